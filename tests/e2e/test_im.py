"""The IM claw with a real engine: numbered replies, over channels and restarts, by console and webhook."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from dualclaw import Decision, DecisionAction, ListRunsRequest, ResumeRequest, RunState
from dualclaw_clients.engine_client import EngineClient
from tests.nats_servers import free_port

from .approvals import BIG, notes, settings_of
from .conftest import ROOT, Process, run_command
from .process import Launcher

SECRET = "the secret of this test"
ASKED = (
    "One moment.\n\n{n}. May this be noted?\n工具：note\n"
    f'参数：{{{{"text": "milk", "number": {BIG}}}}}\n'
    "请回复“{n} 同意”、“{n} 拒绝”、“{n} 跳过”或“{n} 回答 内容”\n"
)


class Console:
    """The console as a person at a pipe uses it."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    async def say(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")
        await self.child.stdin.drain()

    async def read_until(self, end: str) -> str:
        """Return what is printed, up to a text."""
        assert self.child.stdout is not None
        async with asyncio.timeout(100):
            return (await self.child.stdout.readuntil(end.encode())).decode()

    async def read_all(self, *texts: str) -> str:
        """Return the lines that are printed until each of these texts has come, in any order."""
        said = ""
        while not all(text in said for text in texts):
            said += await self.read_until("\n")
        return said

    async def ask(self, line: str, end: str) -> str:
        await self.say(line)
        return await self.read_until(end)


@contextlib.asynccontextmanager
async def console(address: str, *arguments: str) -> AsyncIterator[Console]:
    """Open a console; it is killed in the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "IM_"))}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualclaw_clients.im", "console", "--engine", address, *arguments,
        stdin=-1, stdout=-1, env={**clean, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield Console(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Process]:
    """An engine with a clerk that asks before it notes."""
    process = Process("dualclaw_server", settings_of(tmp_path), tmp_path).start()
    yield process
    process.stop()


async def parked(client: EngineClient) -> list[str]:
    """The ids of the runs that wait."""
    page = await client.list_runs(ListRunsRequest(states=[RunState.RUN_STATE_INTERRUPTED]))
    return [run.id for run in page.runs]


async def approve(client: EngineClient, run_id: str) -> None:
    """Approve everything a run asks, from elsewhere."""
    run = await client.get_run(run_id)
    action = DecisionAction.DECISION_ACTION_APPROVE
    decisions = [Decision(interrupt_id=item.id, action=action) for item in run.interrupts]
    async with client.resume(ResumeRequest(run_id=run_id, decisions=decisions)) as stream:
        assert [event async for event in stream][-1].HasField("done")


async def test_a_number_and_a_word_approve_what_was_shown(engine: Process, tmp_path: Path) -> None:
    """The chat shows tool, exact arguments and how to answer; the reply runs the call, once, and brings the rest."""
    code, out, err = await talk(engine, "note", "1 同意", "1 同意", "hello")
    assert code == 0, err
    answer, rest = out.split("Result: ")
    assert answer == ASKED.format(n=1)
    assert rest == "noted milk\nℹ️ 编号 1 已经处理过，没有做任何决定。\nYou said hello\n"
    assert notes(tmp_path) == [f"milk {BIG}"]


async def test_an_old_number_never_answers_a_new_question(engine: Process, tmp_path: Path) -> None:
    """Numbers of a chat only rise: the second approval is number 2, and 1 stays what it was."""
    code, out, err = await talk(engine, "note", "1 拒绝 太贵", "note", "1 同意", "ok")
    assert code == 0, err
    assert ASKED.format(n=2) in out
    assert "编号 1 已经处理过" in out
    assert notes(tmp_path) == [f"milk {BIG}"]
    assert "Result: noted milk" in out.splitlines()[-1]


async def test_several_are_answered_in_one_message(engine: Process, tmp_path: Path) -> None:
    """One yes and one no; the model hears the reason."""
    code, out, err = await talk(engine, "both", "1 同意，2 拒绝：已经有了")
    assert code == 0, err
    assert notes(tmp_path) == [f"milk {BIG}"]
    assert "已经有了" in out


async def test_a_condition_approves_nothing(engine: Process, tmp_path: Path) -> None:
    """Said with a but, nothing runs, and the person sees what is still open."""
    _, out, _ = await talk(engine, "note", "1 ok, but only half of it")
    assert "没有做任何决定" in out
    assert out.count("1. May this be noted?") == 2
    assert notes(tmp_path) == []


async def test_a_question_beside_an_approval_is_answered_by_its_number(engine: Process, tmp_path: Path) -> None:
    """Approval and question in one message, each to its own."""
    code, out, err = await talk(engine, "mixed", "1 ok", "two or three")
    assert code == 0, err
    assert "Result: two or three" in out
    assert notes(tmp_path) == ["milk 0"]


async def talk(engine: Process, *lines: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "dualclaw_clients.im", "console", "--engine", engine.address]
    return await run_command(*command, stdin="\n".join(lines).encode())


async def test_what_is_approved_elsewhere_reaches_the_chat_that_asked(engine: Process, tmp_path: Path) -> None:
    """While the console waits, and, with a state file, also when it was down meanwhile: the result comes once."""
    state = str(tmp_path / "im.db")
    async with EngineClient(engine.address) as client:
        async with console(engine.address, "--state", state) as person:
            await person.ask("note", "1 回答 内容”\n")
            await approve(client, (await parked(client))[0])
            assert await person.read_until("noted milk\n") == "Result: noted milk\n"
            await person.ask("note", "2 回答 内容”\n")
        await approve(client, (await parked(client))[0])
        async with console(engine.address, "--state", state) as person:
            # The kill may have come before the question was noted as sent: then it comes first, once more.
            assert (await person.read_until("noted milk\n")).endswith("Result: noted milk\n")
            assert await person.ask("hello", "hello\n") == "You said hello\n"


async def test_an_approval_asked_elsewhere_is_given_in_the_console(engine: Process, tmp_path: Path) -> None:
    """/approvals lists what waits in the tenant, with the run's id; its number approves it, here and for the page."""
    async with console(engine.address, "--state", str(tmp_path / "a.db"), "--chat", "asker") as asker:
        await asker.ask("note", "1 回答 内容”\n")
        async with EngineClient(engine.address) as client, console(engine.address, "--chat", "boss") as boss:
            (run_id,) = await parked(client)
            listed = await boss.ask(f"/approvals {run_id}", "1 回答 内容”\n")
            assert f"任务 {run_id}（clerk，来自 im_console）" in listed
            assert await boss.ask("1 同意", "noted milk\n") == "Result: noted milk\n"
            assert await boss.ask("/approvals", "\n") == "ℹ️ 没有等待处理的事项。\n"
        assert await asker.read_until("noted milk\n") == "Result: noted milk\n"
    assert notes(tmp_path) == [f"milk {BIG}"]


async def test_cancel_ends_what_waits_and_new_begins_anew(engine: Process, tmp_path: Path) -> None:
    """/cancel frees a parked conversation and the chat hears the end; /new leaves it."""
    async with EngineClient(engine.address) as client, console(engine.address) as person:
        await person.ask("note", "1 回答 内容”\n")
        await person.say("/cancel")
        await person.read_all("正在取消任务", "任务已取消。\n")
        assert await parked(client) == []
        assert await person.ask("hello", "hello\n") == "You said hello\n"
        await person.ask("note", "2 回答 内容”\n")
        assert "新的对话" in await person.ask("/new", "\n")
        assert await person.ask("hello", "hello\n") == "You said hello\n"
        assert len(await parked(client)) == 1


# Webhook


def signed(body: bytes, timestamp: int | None = None, secret: str = SECRET) -> dict[str, str]:
    """Headers as the README of the other side would make them."""
    at = str(timestamp or int(time.time()))
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return {"Dualclaw-Timestamp": at, "Dualclaw-Signature": f"v1={digest}", "Content-Type": "application/json"}


class OtherSide:
    """The platform behind the webhook: takes replies, checks their signatures, drops what it has by its key."""

    def __init__(self) -> None:
        self.replies: list[dict[str, str]] = []
        self.keys: list[str] = []
        self.url = ""
        self._changed = asyncio.Condition()
        self._open: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:])}
            body = await reader.readexactly(int(headers["content-length"]))
            expected = signed(body, int(headers["dualclaw-timestamp"]))["Dualclaw-Signature"]
            assert headers["dualclaw-signature"] == expected
            if headers["idempotency-key"] not in self.keys:
                self.keys.append(headers["idempotency-key"])
                self.replies.append(json.loads(body))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            async with self._changed:
                self._changed.notify_all()
        writer.close()

    async def close(self) -> None:
        """End what is open."""
        for writer in self._open:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def wait_for(self, count: int) -> list[dict[str, str]]:
        async with asyncio.timeout(100), self._changed:
            await self._changed.wait_for(lambda: len(self.replies) >= count)
        return self.replies


@pytest.fixture
async def other_side() -> AsyncIterator[OtherSide]:
    """The platform, on a loopback socket."""
    side = OtherSide()
    async with await asyncio.start_server(side.serve, "127.0.0.1", 0) as server:
        side.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/replies"
        yield side
        server.close()
        await side.close()


def webhook(launch: Launcher, engine: Process, side: OtherSide, folder: Path, **more: str) -> Process:
    """Start the claw as a service."""
    return launch(
        "dualclaw_clients.im",
        **{
            "DUALCLAW_ENGINE": engine.address,
            "DUALCLAW_IM_CONNECTORS": "webhook",
            "DUALCLAW_IM_STATE": str(folder / "im.db"),
            "DUALCLAW_IM_WEBHOOK_LISTEN": "127.0.0.1:0",
            "DUALCLAW_IM_WEBHOOK_SECRETS": SECRET,
            "DUALCLAW_IM_WEBHOOK_REPLY_URL": side.url,
            "DUALCLAW_IM_WEBHOOK_APPROVERS": "boss",
            "IM_USE_ENGINE_CORE": "on",
            **more,
        },
    )


async def post(claw: Process, message_id: str, text: str, user: str = "u1", chat: str = "c1") -> str:
    """Hand in a message; returns what the claw says to it."""
    body = json.dumps({"message_id": message_id, "chat_id": chat, "user_id": user, "text": text}).encode()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.post(claw.address, content=body, headers=signed(body))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["status"])


async def test_the_webhook_answers_asks_and_lets_only_approvers_decide(
    launch: Launcher, engine: Process, other_side: OtherSide, tmp_path: Path
) -> None:
    """A message is acknowledged at once and answered once; who may chat may not approve, the approver may."""
    claw = webhook(launch, engine, other_side, tmp_path)
    assert await post(claw, "m1", "hello") == "accepted"
    assert await post(claw, "m1", "hello") == "duplicate"
    assert (await other_side.wait_for(1))[0] == {
        "bot": "bot",
        "chat_id": "c1",
        "type": "text",
        "text": "You said hello",
    }
    await post(claw, "m2", "note")
    await other_side.wait_for(2)
    await post(claw, "m3", "1 同意")
    assert "没有审批权限" in (await other_side.wait_for(3))[2]["text"]
    assert notes(tmp_path) == []
    await post(claw, "m4", "1 同意", user="boss")
    assert (await other_side.wait_for(4))[3]["text"] == "Result: noted milk"
    assert await post(claw, "m4", "1 同意", user="boss") == "duplicate"
    assert notes(tmp_path) == [f"milk {BIG}"]
    assert claw.stop() == 0


async def test_a_killed_claw_loses_and_doubles_nothing(
    launch: Launcher, engine: Process, other_side: OtherSide, tmp_path: Path
) -> None:
    """Killed while it answers and while a run is parked; started again it answers everything once."""
    claw = webhook(launch, engine, other_side, tmp_path)
    for number in range(5):
        await post(claw, f"m{number}", f"text {number}")
    claw.kill()
    claw = webhook(launch, engine, other_side, tmp_path)
    replies = await other_side.wait_for(5)
    assert [reply["text"] for reply in replies] == [f"You said text {number}" for number in range(5)]
    await post(claw, "n1", "note")
    await other_side.wait_for(6)
    claw.kill()
    async with EngineClient(engine.address) as client:
        await approve(client, (await parked(client))[0])
        webhook(launch, engine, other_side, tmp_path)
        assert (await other_side.wait_for(7))[6]["text"] == "Result: noted milk"
    assert len(other_side.replies) == 7


async def test_two_claws_on_one_file_answer_each_message_once_also_when_one_is_killed(
    launch: Launcher, engine: Process, other_side: OtherSide, tmp_path: Path
) -> None:
    """Every message is delivered to both at once, in many chats; one dies with work in hand, the other has it all."""
    claws = [webhook(launch, engine, other_side, tmp_path) for _ in range(2)]
    said: dict[str, list[str]] = {}

    async def deliver(number: int) -> None:
        tries = [post(claw, "m1", f"text {number}", chat=f"c{number}") for claw in claws]
        results = await asyncio.gather(*tries, return_exceptions=True)
        said[f"c{number}"] = [result for result in results if isinstance(result, str)]

    async with asyncio.TaskGroup() as group:
        for number in range(24):
            group.create_task(deliver(number))
        await other_side.wait_for(4)
        claws[1].kill()
    assert all(words.count("accepted") <= 1 for words in said.values())
    # What neither took, because its sender got no word, is delivered again, as senders do.
    for number in range(24):
        await post(claws[0], "m1", f"text {number}", chat=f"c{number}")
    webhook(launch, engine, other_side, tmp_path)  # takes up what the dead one had
    replies = await other_side.wait_for(24)
    assert sorted((reply["chat_id"], reply["text"]) for reply in replies) == sorted(
        (f"c{number}", f"You said text {number}") for number in range(24)
    )


async def test_the_example_of_the_other_side_chats(
    launch: Launcher, engine: Process, other_side: OtherSide, tmp_path: Path
) -> None:
    """examples/webhook_bot.py signs what is typed, checks what comes back and prints it."""
    port = free_port()
    other_side.url = f"http://127.0.0.1:{port}/"
    claw = webhook(launch, engine, other_side, tmp_path, DUALCLAW_IM_LANGUAGE="en")
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples/webhook_bot.py"), claw.address, str(port), stdin=-1, stdout=-1,
        env={**os.environ, "SECRET": SECRET, "no_proxy": "127.0.0.1"},
    )  # fmt: skip
    chat = Console(child)
    try:
        assert await chat.ask("hello", "\n") == "You said hello\n"
        assert "1. May this be noted?\nTool: note\n" in await chat.ask("note", 'TEXT"\n')
    finally:
        child.kill()
        await child.communicate()
