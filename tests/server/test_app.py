import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualclaw import GetRunRequest, RunState
from dualclaw.rpc import EngineServiceAsyncStub
from dualclaw.status import error_from_rpc
from dualclaw_server.app import Parts, engine_server, load_agents, longest_tool, make_parts
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.store import RunKey
from dualclaw_server.engine.tool import tool
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.servicers.access import anonymous_access
from dualclaw_server.servicers.listening import StartError
from dualclaw_server.settings import Settings, SettingsError
from dualclaw_server.stores.memory import MemoryStore
from tests.server.conftest import ServeEngine, ask
from tests.toolchains import require

TIMEOUT = 60.0
WORDS = {"say": [{"text": "one two three four five six", "chunk": 4}]}
ENDLESS = {"say": [{"text": "begun"}, {"hang": True}]}


async def test_a_question_is_answered_over_the_wire(server: ServeEngine) -> None:
    """Settings, store, model, runner and rpcs fit together: events 1 to n, one done, the caller's trace on each."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with server() as served:
        call = served.engine.Run(ask(claw="web"), metadata=(("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),))
        events = [event async for message in call for event in message.events]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.WhichOneof("payload") for event in events].count("done") == 1
    assert events[-1].done.content == "Hello, world."
    assert {(event.trace_id, event.claw, event.tenant_id) for event in events} == {(trace_id, "web", "default")}


def test_a_process_may_stand_still_for_as_long_as_its_slowest_tool() -> None:
    """The longest timeout counts, those of sub-agents' tools too; none is shorter than that of a tool by default."""

    @tool(timeout=500)
    async def slow() -> str:
        return ""

    @tool(timeout=90)
    async def other() -> str:
        return ""

    assert longest_tool([]) == longest_tool([Agent("a")]) == 60
    assert longest_tool([Agent("a", tools=[other]), Agent("b")]) == 90
    assert longest_tool([Agent("a", tools=[other], sub_agents=[Agent("b", tools=[slow])])]) == 500


async def test_an_unknown_agent_is_not_found(server: ServeEngine) -> None:
    """The engine's own refusals go out with their reason."""
    async with server() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.engine.Run(ask(agent="nobody")).read()
    assert error_from_rpc(caught.value).reason == "UNKNOWN_AGENT"
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_drain_lets_a_run_end_within_the_grace_time(server: ServeEngine) -> None:
    """Health goes NOT_SERVING, new runs are OVERLOADED with a time to retry, the one at work ends with its done."""
    gate = asyncio.Event()

    @tool(effect="read")
    async def wait() -> str:
        await gate.wait()
        return "waited"

    script = ({"when": {"step": 0}, "say": [{"text": "One moment."}, {"call": "wait"}]}, {"say": [{"text": "Done."}]})
    async with server(*script, agents=[Agent("assistant", tools=[wait])]) as served, asyncio.timeout(TIMEOUT):
        call = served.engine.Run(ask())
        messages = aiter(call)
        await anext(messages)
        draining = asyncio.create_task(served.server.drain(TIMEOUT))
        health, request = health_pb2_grpc.HealthStub(served.channel), health_pb2.HealthCheckRequest()
        while (await health.Check(request)).status != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.engine.Run(ask()).read()
        refusal = error_from_rpc(caught.value)
        assert (refusal.reason, refusal.retry_after) == ("OVERLOADED", 1.0)
        gate.set()
        events = [event async for message in messages for event in message.events]
        assert events[-1].done.content == "One moment.\n\nDone."
        await draining


async def test_a_drain_hands_over_what_does_not_end_in_time(server: ServeEngine) -> None:
    """After the grace time the stream ends UNAVAILABLE, the run stays RUNNING for whoever claims it next."""
    async with server(ENDLESS) as served:
        call = served.engine.Run(ask())
        run_id = dict(await call.initial_metadata())["dualclaw-run-id"]
        messages = aiter(call)
        await anext(messages)
        async with asyncio.timeout(TIMEOUT):
            await served.server.drain(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(messages)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        head = await served.store.head(RunKey("default", run_id))
        assert head.state == RunState.RUN_STATE_RUNNING


async def test_a_second_server_on_the_same_port_does_not_start(server: ServeEngine) -> None:
    """It says which address, instead of quietly sharing the calls of the first."""
    async with server() as first:
        with pytest.raises(StartError, match=first.address):
            async with server(listen=first.address):
                pass


@pytest.mark.parametrize(
    ("listen", "reason"),
    [("192.0.2.1:0", "Cannot assign requested address"), ("no-such-host.invalid:0", ".*(?:[Nn]ame|resolution)")],
)
async def test_an_address_of_another_machine_is_refused_with_the_reason(listen: str, reason: str) -> None:
    """What the operating system says is what the operator reads."""
    settings = Settings(listen=listen, store="memory:", allow_anonymous=True)
    with pytest.raises(StartError, match=f"cannot listen on {listen}: {reason}"):
        async with engine_server(settings, make_parts(settings)):
            pass


async def test_a_request_above_the_limit_is_refused_and_the_server_lives_on(server: ServeEngine) -> None:
    """More than 16 MiB is RESOURCE_EXHAUSTED from gRPC itself; the next call is answered."""
    async with server() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.engine.Run(ask("x" * (17 << 20))).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.engine.GetRun(GetRunRequest(run_id="none"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_tls_asks_clients_for_a_certificate_when_told_so(tmp_path: Path) -> None:
    """With a client CA a client without certificate does not get in, one with it does."""
    certificates = await make_certificates(tmp_path)
    settings = Settings(
        listen="localhost:0",
        store="memory:",
        tls_cert=certificates / "server.pem",
        tls_key=certificates / "server.key",
        tls_client_ca=certificates / "ca.pem",
    )
    roots = (certificates / "ca.pem").read_bytes()
    pair = ((certificates / "client.key").read_bytes(), (certificates / "client.pem").read_bytes())
    async with engine_server(settings, make_parts(settings)) as made:
        for credentials, code in (
            (grpc.ssl_channel_credentials(roots), grpc.StatusCode.UNAVAILABLE),
            (grpc.ssl_channel_credentials(roots, *pair), grpc.StatusCode.NOT_FOUND),
        ):
            async with grpc.aio.secure_channel(made.address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await EngineServiceAsyncStub(channel).GetRun(GetRunRequest(run_id="none"), timeout=TIMEOUT)
                assert caught.value.code() == code


async def make_certificates(folder: Path) -> Path:
    """Make a CA, and a server's and a client's certificate signed by it, with the openssl command."""
    require("openssl")
    commands = [
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ca -days 2",
        *(
            f"openssl req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name} && "
            f"printf subjectAltName=DNS:localhost > {name}.ext && openssl x509 -req -in {name}.csr -CA ca.pem "
            f"-CAkey ca.key -CAcreateserial -extfile {name}.ext -out {name}.pem -days 2"
            for name in ("server", "client")
        ),
    ]
    for command in commands:
        process = await asyncio.create_subprocess_shell(
            command, cwd=folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT)
        assert process.returncode == 0, errors
    return folder


@pytest.fixture
def agents_module(tmp_path: Path) -> Iterator[str]:
    """The name of an importable module with agents in every form, right and wrong."""
    (tmp_path / "agents_of_test.py").write_text(
        "from dualclaw_server.engine.agent import Agent\n"
        "one = Agent(name='one')\n"
        "two = [one, Agent(name='two')]\n"
        "def made():\n    return two\n"
        "def broken():\n    return 1 / 0\n"
        "class holder:\n    inner = one\n"
        "empty = []\n"
        "text = 'one'\n"
    )
    (tmp_path / "agents_that_raise.py").write_text("\nraise RuntimeError('no database')\n")
    (tmp_path / "agents_that_import.py").write_text("\n\nimport no_such_module\n")
    sys.path.insert(0, str(tmp_path))
    yield "agents_of_test"
    sys.path.remove(str(tmp_path))
    for name in ("agents_of_test", "agents_that_raise", "agents_that_import"):
        sys.modules.pop(name, None)


def test_agents_are_loaded_from_every_form(agents_module: str) -> None:
    """An agent, a sequence, a function and a nested attribute all work."""
    names = {path: [agent.name for agent in load_agents(f"{agents_module}:{path}")] for path in ("one", "two", "made")}
    assert names == {"one": ["one"], "two": ["one", "two"], "made": ["one", "two"]}
    assert load_agents(f"{agents_module}:holder.inner")[0].name == "one"


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("no_such_module:agents", "ModuleNotFoundError: No module named 'no_such_module'$"),
        ("agents_of_test:three", "AttributeError: module 'agents_of_test' has no attribute 'three'$"),
        ("agents_that_import:agents", "No module named 'no_such_module' .*agents_that_import.py:3.$"),
        ("agents_of_test:broken", "ZeroDivisionError: division by zero (.*agents_of_test.py:7)"),
        ("agents_of_test:empty", "must be an Agent"),
        ("agents_of_test:text", "must be an Agent"),
        ("agents_that_raise:agents", "no database .*agents_that_raise.py:2"),
    ],
)
def test_agents_that_cannot_be_loaded_say_why_and_where(agents_module: str, reference: str, text: str) -> None:
    """An error inside the module is told with its line, a wrong value with what would be right."""
    with pytest.raises(ValueError, match=text):
        load_agents(reference)


def test_all_parts_that_cannot_be_made_are_told_at_once(tmp_path: Path) -> None:
    """Keys, store, model and agents: every fault is named by its variable."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"key_sha256": "x"}]))
    settings = Settings(keys_file=keys, store="tape:x", model="oracle", agents="no_such_module:x")
    with pytest.raises(SettingsError) as caught:
        make_parts(settings)
    text = "\n".join(caught.value.problems)
    for name in ("KEYS_FILE", "STORE", "MODEL", "AGENTS"):
        assert f"DUALCLAW_{name}:" in text


class Shared(Interceptor):
    """Holds something open for all runs."""

    def __init__(self) -> None:
        super().__init__(name="shared")
        self.closed = 0

    async def aclose(self) -> None:
        self.closed += 1


async def test_interceptors_are_closed_once_when_the_engine_ends() -> None:
    """One that two agents share, a sub-agent among them, is closed after the drain, and only once."""
    shared = Shared()
    below = Agent("below", interceptors=[shared])
    agents = [Agent("one", interceptors=[shared], sub_agents=[below]), Agent("two", interceptors=[shared])]
    model = ScriptedModel.parse(json.dumps({"name": "m", "turns": [WORDS]}))
    parts = Parts(MemoryStore(), model, agents, anonymous_access(loopback=True))
    async with engine_server(Settings(listen="127.0.0.1:0", grace=0), parts):
        assert shared.closed == 0
    assert shared.closed == 1
