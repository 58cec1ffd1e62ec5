"""A copy of an original front-end, run by node, on the original route of a real gateway and engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.toolchains import require

from . import approvals, chat
from .chat import LONG, STEPWISE, STOPS, open_gate
from .conftest import ROOT, Launcher

FRONT_END = ROOT / "tests/clients/web/node/old_front_end.mjs"
State = dict[str, object]


class FrontEnd:
    """One question asked by the front-end, read state by state."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def state(self) -> State | None:
        """Return what it shows after the next frame; None at the end of the stream."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        found = json.loads(line or '"died"')
        assert found != "died", (await self._rest()).decode()
        return None if found == "over" else found

    async def all(self) -> list[State]:
        """Return everything it shows from here on."""
        found = []
        while (state := await self.state()) is not None:
            found.append(state)
        return found

    async def until(self, fits: Callable[[State], bool]) -> State:
        """Read until a state fits."""
        while (state := await self.state()) is not None:
            if fits(state):
                return state
        raise AssertionError("the stream ended before that")

    async def _rest(self) -> bytes:
        assert self._process.stderr is not None
        return await self._process.stderr.read()


@asynccontextmanager
async def asking(web: str, content: str, **more: object) -> AsyncIterator[FrontEnd]:
    """Ask a question; leaving the block closes the tab."""
    process = await asyncio.create_subprocess_exec(
        require("node"), str(FRONT_END), f"{web}/messages/stream", json.dumps({"content": content, **more}),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=2**22,
    )  # fmt: skip
    try:
        yield FrontEnd(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def gateway(launch: Launcher, settings: dict[str, str]) -> tuple[str, str]:
    """Start an engine and a gateway; returns the addresses of both."""
    engine = launch("dualclaw_server", **settings)
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=engine.address)
    return engine.address, web.address


async def newest(http: httpx.AsyncClient) -> dict[str, object]:
    """Return the newest run."""
    run: dict[str, object] = (await http.get("/v1/runs")).json()["runs"][0]
    return run


async def test_an_engine_killed_in_mid_answer_is_a_rewind_nobody_sees(launch: Launcher, tmp_path: Path) -> None:
    """The engine withdraws its text and writes it anew; the front-end shows each character once, in order."""
    settings = chat.settings_of(tmp_path, DUALCLAW_STORE="sqlite:old.db")
    engine = launch("dualclaw_server", **settings)
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=engine.address)
    async with asking(web.address, f"slow {STEPWISE}") as front_end:
        begun = await front_end.until(lambda state: STOPS[0] in str(state["text"]))
        engine.kill()
        launch("dualclaw_server", **{**settings, "DUALCLAW_LISTEN": engine.address})
        open_gate(tmp_path / "default")
        states = await front_end.all()
    shown = [str(state["text"]) for state in [begun, *states]]
    assert [text for text in shown if not LONG.startswith(text)] == []
    assert shown == sorted(shown, key=len)
    assert shown[-1] == LONG
    assert states[-1]["done"] is True
    async with httpx.AsyncClient(base_url=web.address, timeout=60) as http:
        log = (await http.get(f"/v1/runs/{(await newest(http))['id']}/events")).text
    assert log.count('"type": "rewind"') == 1


async def test_an_approval_is_seen_as_a_waiting_step_and_given_elsewhere(launch: Launcher, tmp_path: Path) -> None:
    """The run waits with its text whole; a second message is told where to decide; then the conversation goes on."""
    _, web = gateway(launch, approvals.settings_of(tmp_path))
    async with asking(web, "note") as front_end:
        states = await front_end.all()
    last = states[-1]
    assert (last["type"], last["text"], last["error"]) == ("done", "One moment.", "")
    (step,) = last["steps"] if isinstance(last["steps"], list) else ()
    assert (step["name"], step["running"], step["says"]) == ("note", True, "May this be noted?")
    assert step["hint"]
    conversation = str(last["conversation"])
    async with asking(web, "more", conversation_id=conversation) as front_end:
        (refused,) = await front_end.all()
    assert "May this be noted?" in str(refused["error"])
    async with httpx.AsyncClient(base_url=web, timeout=60) as http:
        run = await newest(http)
        items = run["interrupts"]
        assert isinstance(items, list)
        decision = {"interrupt_id": items[0]["id"], "action": "approve"}
        answer = await http.post(f"/v1/runs/{run['id']}/resume", json={"decisions": [decision]})
        assert '"content": "Result: noted milk"' in answer.text
    async with asking(web, "more", conversation_id=conversation) as front_end:
        assert (await front_end.all())[-1]["text"] == "You said more"
    assert approvals.notes(tmp_path) == [f"milk {approvals.BIG}"]


async def test_failures_and_a_cancel_are_one_last_frame(launch: Launcher, tmp_path: Path) -> None:
    """No such agent, no such conversation by an old integer id, a model that fails, a run that somebody cancels."""
    _, web = gateway(launch, chat.settings_of(tmp_path))
    for more, says in (({"agent": "nobody"}, "nobody"), ({"conversation_id": 7}, "no such conversation")):
        async with asking(web, "hello", **more) as front_end:
            (state,) = await front_end.all()
        assert state["type"] == "error"
        assert says in str(state["error"])
    async with asking(web, "fail") as front_end:
        failed = (await front_end.all())[-1]
    assert (failed["text"], failed["error"]) == ("It begins.", "The key is not valid.")
    assert failed["trace"]
    async with httpx.AsyncClient(base_url=web, timeout=60) as http, asking(web, "hang") as front_end:
        await front_end.until(lambda state: state["text"] == "So far, so")
        await http.post(f"/v1/runs/{(await newest(http))['id']}/cancel")
        (last,) = await front_end.all()
    assert (last["type"], last["text"], last["error"]) == ("done", "So far, so", "")


async def test_a_front_end_that_leaves_finds_the_same_answer_by_its_request_id(
    launch: Launcher, tmp_path: Path
) -> None:
    """The run goes on without it; asked again with the same request_id it reads the whole answer of that one run."""
    _, web = gateway(launch, chat.settings_of(tmp_path))
    async with asking(web, f"slow {STEPWISE}", request_id="one") as front_end:
        await front_end.until(lambda state: STOPS[0] in str(state["text"]))
    open_gate(tmp_path / "default")
    async with asking(web, f"slow {STEPWISE}", request_id="one") as front_end:
        states = await front_end.all()
    assert states[-1]["text"] == LONG
    async with httpx.AsyncClient(base_url=web, timeout=60) as http:
        runs = (await http.get("/v1/runs")).json()["runs"]
    assert [run["state"] for run in runs] == ["RUN_STATE_SUCCEEDED"]
