"""What a run asks, through the web routes, the old front-ends' route, the IM console and the command line.

One engine and one gateway for all tests; each uses runs of its own.
"""

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import aconnect_sse

from .approvals import BIG, keys_of, notes, settings_of
from .conftest import Process, run_command

Wire = dict[str, object]


class Clerk:
    """A served clerk, and a client of its gateway for one tenant."""

    def __init__(self, folder: Path, engine: Process, web: Process, tenant: str, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.web = web
        self.tenant = tenant
        self.http = http
        self._folder = folder

    def notes(self) -> list[str]:
        """The lines that were noted for the tenant."""
        return notes(self._folder, self.tenant)

    async def stream(self, path: str, body: Wire | None = None, **headers: str) -> list[Wire]:
        """Read a native stream to its end."""
        method = "GET" if body is None else "POST"
        async with aconnect_sse(self.http, method, path, json=body, headers=headers) as source:
            assert source.response.status_code == 200, await source.response.aread()
            return [json.loads(message.data) async for message in source.aiter_sse() if message.data]

    async def ask(self, text: str, **more: object) -> list[Wire]:
        """Start a run; returns its first segment."""
        return await self.stream("/v1/runs", {"message": {"role": "ROLE_USER", "parts": [{"text": text}]}, **more})

    async def original(self, text: str, **more: object) -> list[Wire]:
        """Ask as an old front-end does."""
        answer = await self.http.post("/messages/stream", json={"content": text, **more})
        frames = answer.content.split(b"\n\n")
        assert frames.pop() == b""
        return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]

    async def run(self, run_id: object) -> Wire:
        """Return a run."""
        found: Wire = (await self.http.get(f"/v1/runs/{run_id}")).json()["run"]
        return found

    async def cli(self, *args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """Use the command line as this tenant."""
        command = [sys.executable, "-m", "dualclaw_clients.cli", "--engine", self.engine.address, *args]
        return await run_command(*command, stdin=stdin, DUALCLAW_API_KEY=self.tenant)

    async def console(self, *lines: str) -> tuple[int, str, str]:
        """Talk to the IM console as this tenant."""
        command = [sys.executable, "-m", "dualclaw_clients.im", "console", "--engine", self.engine.address]
        return await run_command(*command, stdin="\n".join(lines).encode(), DUALCLAW_API_KEY=self.tenant)


TENANTS = [f"tenant-{number}" for number in range(20)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Process, Process, Iterator[str]]]:
    """An engine with many tenants, and a gateway."""
    folder = tmp_path_factory.mktemp("clerk")
    settings = settings_of(folder, DUALCLAW_KEYS_FILE=keys_of(folder, *TENANTS))
    engine = Process("dualclaw_server", settings, folder).start()
    web = Process(
        "dualclaw_clients.web", {"DUALCLAW_WEB_LISTEN": "127.0.0.1:0", "DUALCLAW_ENGINE": engine.address}, folder
    ).start()
    yield folder, engine, web, iter(TENANTS)
    web.stop()
    engine.stop()


@pytest.fixture
async def clerk(served: tuple[Path, Process, Process, Iterator[str]]) -> AsyncIterator[Clerk]:
    """A clerk for a tenant nobody has had."""
    folder, engine, web, tenants = served
    tenant = next(tenants)
    headers = {"Authorization": f"Bearer {tenant}"}
    async with httpx.AsyncClient(base_url=web.address, timeout=60, headers=headers) as http:
        yield Clerk(folder, engine, web, tenant, http)


def asked(events: list[Wire]) -> list[Wire]:
    """The items of the interrupt a segment ends with."""
    assert [event["type"] for event in events[-2:]] == ["interrupt", "done"]
    items = events[-2]["items"]
    assert isinstance(items, list)
    return items


def decision(item: Wire, action: str = "APPROVE", **more: object) -> Wire:
    return {"interrupt_id": item["id"], "action": f"DECISION_ACTION_{action}", **more}


async def test_the_web_route_answers_and_repeats_itself_by_request_id(clerk: Clerk) -> None:
    """Both name styles are taken, X-Run-Id is told, and the same request_id gives the same segment, run once."""
    first = await clerk.ask("note")
    run_id, item = first[0]["run_id"], asked(first)[0]
    path = f"/v1/runs/{run_id}/resume"
    styles = (
        {"request_id": "r", "decisions": [decision(item, args_hash=item["args_hash"])]},
        {
            "requestId": "r",
            "runId": run_id,
            "decisions": [
                {"interruptId": item["id"], "action": "DECISION_ACTION_APPROVE", "argsHash": item["args_hash"]}
            ],
        },
    )
    answers = []
    for body in styles:
        async with clerk.http.stream("POST", path, json=body) as response:
            assert (response.status_code, response.headers["x-run-id"]) == (200, run_id)
            answers.append(await response.aread())
    assert answers[0] == answers[1]
    assert clerk.notes() == [f"milk {BIG}"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"decisions": [{"interrupt_id": "call_9", "action": "DECISION_ACTION_APPROVE"}]}, 404, "UNKNOWN_INTERRUPT"),
        ({"decisions": []}, 400, "INVALID_REQUEST"),
        ({"decisions": [{"interrupt_id": "ITEM"}]}, 400, "decisions[0].action"),
        ({"decisions": [{"interrupt_id": "ITEM", "action": "DECISION_ACTION_EDIT", "args_json": "[]"}]}, 400,
         "decisions[0].args_json"),
        ({"decisions": [{"interrupt_id": "ITEM", "action": "DECISION_ACTION_EDIT", "args_json": '{"number": 1}'}]}, 400,
         "decisions[0].args_json"),
        ({"decisions": [{"interrupt_id": "ITEM", "action": "DECISION_ACTION_APPROVE", "args_hash": "other"}]}, 400,
         "decisions[0].args_hash"),
        ({"decisions": [{"interrupt_id": "ITEM", "acton": "DECISION_ACTION_APPROVE"}]}, 400, "decisions[0].acton"),
        ({"run_id": "another", "decisions": []}, 400, "run_id"),
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_is_refused_by_name_and_changes_nothing(
    clerk: Clerk, body: Wire, status: int, reason: str
) -> None:
    """The status follows the engine's code, a wrong field is named, and the run still waits for the same."""
    item = asked(first := await clerk.ask("note"))[0]
    run_id = first[0]["run_id"]
    text = json.dumps(body).replace("ITEM", str(item["id"]))
    answer = await clerk.http.post(f"/v1/runs/{run_id}/resume", content=text)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["reason"] == reason or reason in error["fields"], error
    run = await clerk.run(run_id)
    assert (run["state"], [one["id"] for one in run["interrupts"]]) == ("RUN_STATE_INTERRUPTED", [item["id"]])  # type: ignore[attr-defined]


async def test_a_late_answer_is_409(clerk: Clerk) -> None:
    """Answered already, or a run that waits for nothing: the reason says which."""
    item = asked(first := await clerk.ask("note"))[0]
    path = f"/v1/runs/{first[0]['run_id']}/resume"
    await clerk.stream(path, {"decisions": [decision(item, "SKIP")]})
    answer = await clerk.http.post(path, json={"decisions": [decision(item)]})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (409, "ALREADY_ANSWERED")
    other = await clerk.http.post(path, json={"decisions": [decision({"id": "call_9"})]})
    assert (other.status_code, other.json()["error"]["reason"]) == (409, "RUN_NOT_INTERRUPTED")
    unknown = await clerk.http.post("/v1/runs/none/resume", json={"decisions": [decision(item)]})
    assert (unknown.status_code, unknown.json()["error"]["reason"]) == (404, "UNKNOWN_RUN")
    assert clerk.notes() == []


async def test_a_follower_stays_over_the_park_and_a_reconnect_misses_nothing(clerk: Clerk) -> None:
    """A reader from the start, and one that comes back with the id of the parked end, both see the rest once."""
    first = await clerk.ask("both")
    run_id, (milk, eggs) = first[0]["run_id"], asked(first)
    path, events = f"/v1/runs/{run_id}/resume", f"/v1/runs/{run_id}/events"
    seen: list[Wire] = []
    parked = asyncio.Event()

    async def follow() -> None:
        async with aconnect_sse(clerk.http, "GET", events) as source:
            async for message in source.aiter_sse():
                if message.data:
                    seen.append(json.loads(message.data))
                if len(seen) >= len(first):
                    parked.set()

    async with asyncio.timeout(100):
        following = asyncio.create_task(follow())
        await parked.wait()
        late = asyncio.create_task(clerk.stream(events, **{"Last-Event-ID": str(first[-1]["seq"])}))
        second = await clerk.stream(path, {"decisions": [decision(eggs, "RESPOND", response_json='"by hand"')]})
        assert [item["id"] for item in asked(second)] == [milk["id"]]
        third = await clerk.stream(path, {"decisions": [decision(milk)]})
        await following
        assert seen == first + second + third
        assert await late == second + third
    assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
    end = await clerk.http.get(events, headers={"Last-Event-ID": str(seen[-1]["seq"])})
    assert end.status_code == 204
    assert clerk.notes() == [f"milk {BIG}"]


async def test_runs_that_wait_are_listed_with_what_they_ask(clerk: Clerk) -> None:
    """GET /v1/runs?states=interrupted is an inbox: prompt, tool and the exact text of the arguments."""
    first = await clerk.ask("note")
    await clerk.ask("hello")
    runs = (await clerk.http.get("/v1/runs?states=interrupted")).json()["runs"]
    assert [run["id"] for run in runs] == [first[0]["run_id"]]
    (item,) = runs[0]["interrupts"]
    assert (item["prompt"], item["tool_name"], item["kind"]) == (
        "May this be noted?", "note", "INTERRUPT_KIND_APPROVAL"
    )  # fmt: skip
    assert item["args_json"] == f'{{"text": "milk", "number": {BIG}}}'
    assert (await clerk.http.get("/v1/runs?states=running")).json()["runs"] == []


async def test_an_old_front_end_answers_a_question_without_knowing_of_it(clerk: Clerk) -> None:
    """Its step says what is asked and how, done ends the stream, and the next message brings the rest of the run."""
    first = await clerk.original("ask")
    assert [frame["type"] for frame in first] == ["step", "step", "done"]
    step = first[1]["step"]
    diagnosis = step["diagnosis"]  # type: ignore[index]
    assert (diagnosis["code"], diagnosis["severity"], diagnosis["summary"]) == (
        "input.required", "warning", "Which shop?"
    )  # fmt: skip
    assert diagnosis["hint"]
    assert first[-1]["process_steps"] == [step]
    second = await clerk.original("the market", conversation_id=first[-1]["conversation_id"])
    assert second[0]["step"]["result"] == "the market"  # type: ignore[index]
    assert second[-1]["content"] == "".join(str(f["content"]) for f in second if f["type"] == "delta")
    assert second[-1]["content"] == "Result: the market"
    assert {frame["type"] for frame in first + second} == {"step", "delta", "done"}
    runs = (await clerk.http.get("/v1/runs")).json()["runs"]
    assert [run["state"] for run in runs] == ["RUN_STATE_SUCCEEDED"]


async def test_an_old_front_end_is_told_of_an_approval_and_what_to_do(clerk: Clerk) -> None:
    """The waiting step is in done; a message meanwhile is one error frame that says what waits and where to decide."""
    first = await clerk.original("note")
    steps = [step for step in first[-1]["process_steps"] if "diagnosis" in step]  # type: ignore[attr-defined]
    assert [(step["diagnosis"]["code"], step["diagnosis"]["summary"]) for step in steps] == [
        ("approval.required", "May this be noted?")
    ]
    assert "pprove" in steps[0]["diagnosis"]["hint"]
    (refused,) = await clerk.original("yes", conversation_id=first[-1]["conversation_id"])
    assert refused["type"] == "error"
    diagnosis = refused["diagnosis"]
    assert diagnosis["code"] == "conversation.busy"  # type: ignore[index]
    assert diagnosis["retryable"] is False  # type: ignore[index]
    run = (await clerk.http.get("/v1/runs")).json()["runs"][0]
    for told in ("May this be noted?", f"/v1/runs/{run['id']}/resume", f"/#{run['conversation_id']}"):
        assert told in str(refused["message"])
    assert clerk.notes() == []
    await clerk.stream(f"/v1/runs/{run['id']}/resume", {"decisions": [decision(run["interrupts"][0])]})
    assert clerk.notes() == [f"milk {BIG}"]
    assert (await clerk.original("hello", conversation_id=run["conversation_id"]))[-1]["content"] == "You said hello"


async def test_a_chat_answers_a_question_with_its_next_message(clerk: Clerk) -> None:
    """The console shows the question and how to answer; the reply is its answer, and the chat goes on."""
    code, out, err = await clerk.console("ask", "the market", "hello")
    assert code == 0, err
    assert out == "1. Which shop?\n请直接回复您的答案或“1 跳过”\nResult: the market\nYou said hello\n"
    runs = (await clerk.http.get("/v1/runs")).json()["runs"]
    assert len(runs) == 2


async def test_the_command_line_sees_and_answers_what_a_chat_has_started(clerk: Clerk) -> None:
    """Across channels: asked in a chat, listed, shown and approved at the command line."""
    await clerk.console("both")
    code, out, _ = await clerk.cli("runs", "--state", "interrupted")
    run_id, conversation_id = out.split("\t")[0], out.split("\t")[3]
    code, out, err = await clerk.cli("ask", "--conversation", conversation_id, "and?")
    assert (code, out) == (3, "")
    assert f"dualclaw resume {run_id} approve --id" in err
    code, _, err = await clerk.cli("resume", run_id, "approve")
    assert code == 2
    assert "2 open questions take approve" in err
    code, out, err = await clerk.cli("resume", run_id, "approve", "--all")
    assert (code, out) == (0, "Result: noted eggs\n"), err
    assert sorted(clerk.notes()) == ["eggs 0", f"milk {BIG}"]


async def test_one_segment_after_another_is_answered_at_the_command_line(clerk: Clerk) -> None:
    """An approval, then the question of a tool beside it: each ends with 5 and the command that goes on."""
    code, out, err = await clerk.cli("ask", "mixed")
    assert (code, out) == (5, "")
    command = shlex.split(err.split("answer:")[1].splitlines()[0])
    assert command[:2] == ["dualclaw", "resume"]
    code, out, err = await clerk.cli(*command[1:])
    assert (code, out) == (5, "")
    assert "? question of ask_user" in err
    assert "answers: respond --response TEXT | skip" in err
    command = shlex.split(err.split("answer:")[1].splitlines()[0].replace("TEXT", "'two or three'"))
    code, out, err = await clerk.cli(*command[1:])
    assert (code, out) == (0, "Result: two or three\n"), err
    assert clerk.notes() == ["milk 0"]
