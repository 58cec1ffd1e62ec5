"""Bad input, named: each mistake is a typed refusal or error event with its reason and what to do about it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from dualclaw import BusyPolicy, ContentPart, ListRunsRequest, Message, Role, RunRequest
from dualclaw.errors import EngineError, Reason
from dualclaw.status import error_of
from dualclaw_clients.engine_client import EngineClient, Reconnect

from .conftest import Launcher, Process

KEYS = {"alice": ("tenant-a", "alice-key"), "bob": ("tenant-b", "bob-key")}
TURNS: tuple[dict[str, object], ...] = (
    {"when": {"user": "hang"}, "say": [{"text": "…"}, {"hang": True}]},
    {"say": [{"text": "ok"}]},
)


class Setting:
    """An engine with two tenants, and a run and a busy conversation of alice's."""

    def __init__(self, engine: Process) -> None:
        once = Reconnect(total=0)
        self.alice = EngineClient(engine.address, token="alice-key", reconnect=once)
        self.bob = EngineClient(engine.address, token="bob-key", reconnect=once)
        self.nobody = EngineClient(engine.address, reconnect=once)
        self.stranger = EngineClient(engine.address, token="guessed", reconnect=once)
        self.address = engine.address
        self.run_id = self.conversation_id = self.busy_id = self.busy_run_id = ""

    async def prepare(self) -> None:
        async with self.alice.run(question("hi", request_id="taken")) as stream:
            [event async for event in stream]
            self.run_id, self.conversation_id = stream.run_id, stream.conversation_id
        async with self.alice.run(question("hang")) as stream:
            self.busy_id, self.busy_run_id = stream.conversation_id, stream.run_id

    async def close(self) -> None:
        await self.alice.cancel(self.busy_run_id)
        await asyncio.gather(*[c.close() for c in (self.alice, self.bob, self.nobody, self.stranger)])


def question(text: str, **fields: object) -> RunRequest:
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])
    return RunRequest(message=message, **fields)  # type: ignore[arg-type]


async def start(client: EngineClient, request: RunRequest) -> None:
    async with client.run(request):
        pass


async def attach(client: EngineClient, run_id: str, after_seq: int = 0) -> None:
    async with client.attach(run_id, after_seq=after_seq) as stream:
        [event async for event in stream]


@pytest.fixture
async def setting(launch: Launcher, write_script: Callable[..., str], tmp_path: Path) -> AsyncIterator[Setting]:
    entries = [
        {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "subject": name, "roles": ["user"]}
        for name, (tenant, key) in KEYS.items()
    ]
    (tmp_path / "keys.json").write_text(json.dumps(entries), "utf-8")
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="memory:",
        DUALCLAW_KEYS_FILE=str(tmp_path / "keys.json"),
        DUALCLAW_MODEL=write_script(*TURNS),
    )
    setting = Setting(engine)
    await setting.prepare()
    yield setting
    await setting.close()


MISTAKES: list[tuple[str, Reason, str, Callable[[Setting], Awaitable[object]]]] = [
    ("unknown agent", "UNKNOWN_AGENT", "assistant", lambda s: start(s.alice, question("x", agent="asistant"))),
    ("no message", "INVALID_REQUEST", "message", lambda s: start(s.alice, RunRequest())),
    ("empty message", "INVALID_REQUEST", "message.parts", lambda s: start(s.alice, question(""))),
    ("message too large", "INVALID_REQUEST", "message", lambda s: start(s.alice, question("x" * 3_000_000))),
    ("unknown run", "UNKNOWN_RUN", "run", lambda s: s.alice.get_run("no-such-run")),
    ("another tenant's run", "UNKNOWN_RUN", "run", lambda s: attach(s.bob, s.run_id)),
    ("cancel of another tenant's run", "UNKNOWN_RUN", "run", lambda s: s.bob.cancel(s.run_id)),
    (
        "another tenant's conversation",
        "UNKNOWN_CONVERSATION",
        "conversation",
        lambda s: start(s.bob, question("x", conversation_id=s.conversation_id)),
    ),
    ("attach beyond the end", "AFTER_SEQ_OUT_OF_RANGE", "after_seq", lambda s: attach(s.alice, s.run_id, 999)),
    (
        "request_id with another body",
        "REQUEST_ID_REUSED",
        "request_id",
        lambda s: start(s.alice, question("other", request_id="taken")),
    ),
    (
        "busy conversation",
        "CONVERSATION_BUSY",
        "run",
        lambda s: start(s.alice, question("x", conversation_id=s.busy_id, on_busy=BusyPolicy.BUSY_POLICY_REJECT)),
    ),
    ("bad page token", "INVALID_REQUEST", "page_token", lambda s: s.alice.list_runs(ListRunsRequest(page_token="%"))),
    (
        "malformed metadata",
        "INVALID_REQUEST",
        "metadata",
        lambda s: start(s.alice, question("x", metadata={f"k{n}": "v" for n in range(65)})),
    ),
    ("missing key", "UNAUTHENTICATED", "authorization", lambda s: s.nobody.get_run(s.run_id)),
    ("wrong key", "UNAUTHENTICATED", "key", lambda s: s.stranger.get_run(s.run_id)),
]


async def test_each_mistake_is_refused_with_reason_and_hint(setting: Setting) -> None:
    """The reason is the contract's, the text names what is wrong, the hint says what would be right."""
    for name, reason, named, act in MISTAKES:
        with pytest.raises(EngineError) as refused:
            await asyncio.wait_for(_await(act(setting)), 60)
        error = refused.value
        assert error.reason == reason, name
        assert named.lower() in error.message.lower(), f"{name}: {error.message}"
        assert error.hint, name
        assert "alice-key" not in f"{error.message}{error.hint}{dict(error.metadata)}"
    assert (await setting.alice.get_run(setting.run_id)).id == setting.run_id


async def _await(awaitable: Awaitable[object]) -> object:
    return await awaitable


async def test_metadata_that_names_another_tenant_is_refused(setting: Setting) -> None:
    """Only the role service may act for somebody else; a malformed authorization is refused by name."""
    async with EngineClient(setting.address, token="alice-key", tenant="tenant-b") as posing:
        with pytest.raises(EngineError) as refused:
            await posing.get_run(setting.run_id)
    assert refused.value.reason == "PERMISSION_DENIED"
    async with grpc.aio.insecure_channel(setting.address) as channel:
        call = channel.unary_unary("/dualclaw.v1.EngineService/GetRun")(
            b"", metadata=(("authorization", "Basic eA=="),)
        )
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["EngineService/Run", "EngineService/GetRun", "AgentService/GetAgent"])
async def test_bytes_that_are_no_message_are_refused_by_name(method: str, setting: Setting) -> None:
    """A foreign client that sends garbage learns what was expected; it is no fault of the engine."""
    async with grpc.aio.insecure_channel(setting.address) as channel:
        path = f"/dualclaw.v1.{method}"
        call = (
            channel.unary_stream(path)(b"\xff\xff")
            if method.endswith("/Run")
            else channel.unary_unary(path)(b"\xff\xff")
        )
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        error = error_of(await call.code(), await call.details() or "", tuple(await call.trailing_metadata()))
    assert error.reason == "INVALID_REQUEST"
    assert method.partition("/")[2] in error.message


Serve = Callable[[bytes], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A model endpoint that answers every request with the same bytes; returns its base URL."""
    servers: list[asyncio.Server] = []

    async def server(answer: bytes) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # With the body: a connection that is closed with unread bytes is reset, and the answer may be lost.
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
            writer.write(answer)
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(handle, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}/v1"

    yield server
    for running in servers:
        running.close()


HTML = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<!doctype html><h1>Welcome</h1>"
REFUSED = (
    b"HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "Incorrect API key provided: sk-test-secret", "code": "invalid_api_key"}}'
)


@pytest.mark.parametrize(
    ("answer", "code"),
    [(None, "model.unavailable"), (HTML, "model.bad_response"), (REFUSED, "model.auth")],
    ids=["down", "html", "401"],
)
async def test_a_broken_model_endpoint_is_an_error_event(
    answer: bytes | None, code: str, serve: Serve, launch: Launcher, connect: Callable[[str], EngineClient]
) -> None:
    """An endpoint that is down, answers HTML or answers 401 fails the run by name, with a hint and without the key."""
    base_url = await serve(answer) if answer else "http://127.0.0.1:9/v1"
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="memory:",
        DUALCLAW_MODEL="openai:some-model",
        DUALCLAW_MODEL_BASE_URL=base_url,
        DUALCLAW_MODEL_API_KEY="sk-test-secret",
    )
    async with connect(engine.address).run(question("hi"), timeout=100) as stream:
        events = [event async for event in stream]
    error = events[-1].error
    assert error.diagnosis.code == code
    assert error.diagnosis.hint
    assert "sk-test-secret" not in f"{events}{engine.logged()}"
