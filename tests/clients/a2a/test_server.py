"""The claw as a service: keys, cards, hosts and origins, limits, lost connections, draining, the process."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import sys

import grpc
import pytest
from a2a.types.a2a_pb2 import GetExtendedAgentCardRequest, GetTaskRequest, SubscribeToTaskRequest
from a2a.types.a2a_pb2_grpc import A2AServiceStub
from a2a.utils.errors import InternalError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualclaw_clients.a2a.server import ListenError, open_claw
from dualclaw_clients.a2a.settings import A2aSettings
from dualclaw_clients.settings import SettingsError, variables_of
from dualclaw_server.servicers.access import read_keys

from .conftest import BINDINGS, ROOT, collect, message, opened, served

KEY, OTHER = "key-of-one-tenant", "key-of-another"
CALL = {"A2A-Version": "1.0"}


@pytest.fixture
async def guarded(tmp_path):
    """A claw before an engine that wants keys; the claw has one of its own."""
    entries = [
        {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "subject": "s", "roles": ["user"]}
        for key, tenant in ((KEY, "one"), (OTHER, "two"))
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(entries))
    async with served(read_keys(path)) as engine, opened(engine, api_key=KEY) as claw:
        yield claw


async def drained(stream) -> None:
    """Read a stream to its end."""
    async with asyncio.timeout(60):
        async for _ in stream:
            pass


def rpc(method: str, **params: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


async def test_a_call_without_a_key_is_401_with_a_challenge_and_no_call_profits_from_the_claws_own(guarded):
    """HTTP says who is missing what, in a JSON-RPC error of the same id; a stream is refused before it begins."""
    sent = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "conformance: text"}]}}
    for call in (rpc("GetTask", id="t"), rpc("SendMessage", **sent), rpc("SendStreamingMessage", **sent)):
        answer = await guarded.http.post(guarded.url, json=call, headers=CALL)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["id"] == 7
        assert answer.json()["error"]["data"][0]["reason"] == "UNAUTHENTICATED"
    for wrong in ("Basic YTpi", "Bearer", "Bearer wrong", "Bearer a\u00e9"):
        headers = {**CALL, "Authorization": wrong.encode("latin-1")}
        answer = await guarded.http.post(guarded.url, json=rpc("GetTask", id="t"), headers=headers)
        assert answer.status_code == 401, wrong


async def test_a_grpc_call_without_a_key_is_unauthenticated(guarded):
    """The same by gRPC, unary and streamed."""
    async with grpc.aio.insecure_channel(guarded.claw.addresses.grpc) as channel:
        stub = A2AServiceStub(channel)
        for call in (stub.GetTask(GetTaskRequest(id="t")), drained(stub.SendStreamingMessage(message("hi")))):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_callers_key_is_what_the_engine_sees(guarded, binding):
    """With its key a caller has its tenant's tasks; another tenant's key does not find them."""
    seen = await collect(guarded.client(binding, key=KEY).send_message(message("conformance: text")))
    assert seen.states[-1] == "COMPLETED"
    assert (await guarded.client(binding, key=KEY).get_task(GetTaskRequest(id=seen.task_id))).id == seen.task_id
    with pytest.raises(Exception, match="no such task"):
        await guarded.client(binding, key=OTHER).get_task(GetTaskRequest(id=seen.task_id))


async def test_the_public_card_names_the_agent_and_the_extended_one_its_tools(guarded):
    """Anybody may read what the agent is for; its tools are for callers the engine knows."""
    card = (await guarded.http.get(f"{guarded.url}.well-known/agent-card.json")).json()
    assert card["name"] == "conformance"
    assert card["description"] == "Plays the scenarios of the conformance kit."
    assert {i["protocolBinding"]: i["url"] for i in card["supportedInterfaces"]} == {
        "JSONRPC": guarded.url,
        "GRPC": guarded.claw.addresses.grpc,
    }
    assert [skill["id"] for skill in card["skills"]] == ["conformance"]
    assert "pay" not in json.dumps(card["skills"])
    for binding in BINDINGS:
        extended = await guarded.client(binding, key=KEY).get_extended_agent_card(GetExtendedAgentCardRequest())
        assert {"conformance/pay", "conformance/look"} <= {skill.id for skill in extended.skills}
    answer = await guarded.http.post(guarded.url, json=rpc("GetExtendedAgentCard"), headers=CALL)
    assert answer.status_code == 401


async def test_every_agent_has_a_card_that_tells_callers_how_to_name_it(served_claw):
    """The card under the agent's name carries the tenant that routes to it; an unknown agent has none."""
    card = await served_claw.http.get(f"{served_claw.url}agents/conformance/.well-known/agent-card.json")
    assert {i["tenant"] for i in card.json()["supportedInterfaces"]} == {"conformance"}
    assert (await served_claw.http.get(f"{served_claw.url}agents/no/.well-known/agent-card.json")).status_code == 404


async def test_a_card_is_served_while_no_engine_is_there_and_calls_are_503(tmp_path):
    """Discovery outlives the engine; calls say that it cannot be reached, and not where it would be."""
    async with opened("127.0.0.1:1") as claw:
        answer = await claw.http.post(claw.url, json=rpc("GetTask", id="t"), headers=CALL)
        assert answer.status_code == 503
        assert "127.0.0.1:1" not in answer.text
        async with grpc.aio.insecure_channel(claw.claw.addresses.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await A2AServiceStub(channel).GetTask(GetTaskRequest(id="t"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_pages_of_other_origins_and_foreign_hosts_are_not_let_in(served_claw):
    """On loopback a browser's page must reach nothing: neither by its origin nor by a name that resolves here."""
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
        answer = await served_claw.http.post(served_claw.url, json=rpc("ListTasks"), headers={**CALL, **headers})
        assert answer.status_code == 403, headers
    assert (await served_claw.http.post(served_claw.url, json=rpc("ListTasks"), headers=CALL)).status_code == 200


async def test_an_old_version_is_refused_by_name(served_claw):
    """0.3 is not served; an empty version means 0.3 on HTTP, as the protocol has it."""
    for version in ({}, {"A2A-Version": "0.3"}, {"A2A-Version": "2.0"}):
        answer = await served_claw.http.post(served_claw.url, json=rpc("ListTasks"), headers=version)
        assert answer.json()["error"]["code"] == -32009, version
    async with grpc.aio.insecure_channel(served_claw.claw.addresses.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="is not served here"):
            await A2AServiceStub(channel).GetTask(GetTaskRequest(id="t"), metadata=(("a2a-version", "0.3"),))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "Nope"}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": {"role": 9}}}', -32602),
        (b"[" * 100_000, -32603),
    ],
    ids=["half", "batch", "method", "no id", "no message", "deep"],
)
async def test_bad_json_rpc_is_an_error_and_no_crash(served_claw, body, code):
    """Every kind of wrong body has its code, and the claw goes on."""
    answer = await served_claw.http.post(served_claw.url, content=body, headers=CALL)
    assert answer.json()["error"]["code"] == code
    assert (await served_claw.http.get(f"{served_claw.url}healthz")).status_code == 200


async def test_long_requests_are_refused(engine):
    """One limit for both bindings; nothing longer is taken in."""
    async with opened(engine, a2a_max_body=2_000) as claw:
        for binding, words in zip(BINDINGS, ("too large", "(?i)larger than max"), strict=True):
            with pytest.raises(Exception, match=words):
                await collect(claw.client(binding).send_message(message("conformance: text" + "x" * 4_000)))
        seen = await collect(claw.client("GRPC").send_message(message("conformance: text")))
        assert seen.states[-1] == "COMPLETED"


async def test_a_connection_that_brings_no_head_is_closed(tmp_path):
    """Silence and half a head use up a connection each, so neither may last."""
    settings = A2aSettings(engine=f"unix:{tmp_path}/none", a2a_listen="127.0.0.1:0", a2a_grpc_listen="127.0.0.1:0")
    async with open_claw(settings, head_timeout=0.3) as claw:
        port = int(claw.addresses.json_rpc.rstrip("/").rpartition(":")[2])
        for head in (b"", b"GET /healthz HTTP/1.1\r\nHost: l"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            try:
                async with asyncio.timeout(60):
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
            finally:
                writer.transport.abort()


async def test_more_streams_than_the_limit_are_refused_and_room_comes_back(engine):
    """The one too many is 429; when a stream's client leaves, its place is free and the engine's call is closed."""
    async with opened(engine, a2a_max_streams=1) as claw:
        client = claw.client("JSONRPC")
        first = client.send_message(message("conformance: slow"))
        await anext(first)
        assert claw.claw.tasks.open_streams == 1
        sent = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "conformance: text"}]}}
        answer = await claw.http.post(claw.url, json=rpc("SendMessage", **sent), headers=CALL)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        await first.aclose()
        async with asyncio.timeout(60):
            while claw.claw.tasks.open_streams:  # noqa: ASYNC110  # nothing tells when a server has noticed
                await asyncio.sleep(0.02)
        seen = await collect(client.send_message(message("conformance: text")))
        assert seen.states[-1] == "COMPLETED"


@pytest.mark.parametrize("binding", BINDINGS)
async def test_leaving_ends_streams_with_words_and_the_task_goes_on(engine, binding):
    """Who is being read to learns why the stream ends; another claw, or this one again, knows the task."""
    async with opened(engine) as claw:
        stream = claw.client(binding).send_message(message("conformance: slow"))
        task_id = (await anext(stream)).task.id
        leaving = asyncio.create_task(claw.claw.tasks.close_streams())
        with pytest.raises(InternalError, match="shutting down"):
            await drained(stream)
        await leaving
        assert claw.claw.tasks.open_streams == 0
        assert (await claw.http.get(f"{claw.url}healthz")).status_code == 503
    async with opened(engine) as claw:
        client = claw.client(binding)
        assert (await client.get_task(GetTaskRequest(id=task_id))).id == task_id


async def test_a_cut_connection_is_taken_up_again_by_subscribing(served_claw, cutting):
    """The network breaks in the middle of a chunk; the task is subscribed to and the text is whole."""
    url = await cutting(served_claw.url)
    task_id, text = "", ""
    with contextlib.suppress(Exception):
        async for response in served_claw.client("JSONRPC", url=url).send_message(message("conformance: slow")):
            task_id = task_id or response.task.id
            text += "".join(part.text for part in response.artifact_update.artifact.parts)
    assert text.startswith("000 ")
    seen = await collect(
        served_claw.client("JSONRPC").subscribe(SubscribeToTaskRequest(id=task_id)), lambda seen: "030 " in seen.text
    )
    assert "".join(f"{number:03} " for number in range(200)).startswith(seen.text)
    assert seen.first.artifacts[0].parts[0].text.startswith(text)


async def test_health_is_serving_by_both_ways(served_claw):
    """Load balancers ask before they send anybody."""
    assert (await served_claw.http.get(f"{served_claw.url}healthz")).text == "ok\n"
    async with grpc.aio.insecure_channel(served_claw.claw.addresses.grpc) as channel:
        for service in ("", "lf.a2a.v1.A2AService"):
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_address_in_use_is_told_with_its_variable(served_claw):
    """Either port that is taken is named; the first is given back."""
    taken = served_claw.url.removeprefix("http://").rstrip("/")
    for settings, name in (
        ({"a2a_listen": taken, "a2a_grpc_listen": "127.0.0.1:0"}, "DUALCLAW_A2A_LISTEN"),
        ({"a2a_listen": "127.0.0.1:0", "a2a_grpc_listen": taken}, "DUALCLAW_A2A_GRPC_LISTEN"),
    ):
        with pytest.raises(ListenError, match=name):
            async with open_claw(A2aSettings(**settings)):
                pass


async def test_an_address_nobody_can_call_is_not_put_on_the_card():
    """Who listens everywhere has to say how it is called."""
    with pytest.raises(SettingsError) as wrong:
        async with open_claw(A2aSettings(a2a_listen="0.0.0.0:0", a2a_grpc_listen="[::]:0")):
            pass
    assert len(wrong.value.problems) == 2


async def test_the_process_tells_its_addresses_and_drains_on_sigterm(engine):
    """A deploy does not wait for a task's end: the stream says why it ends, the process exits with 0."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualclaw_clients.a2a", "--engine", engine,
        "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0",
        env={**environment, "DUALCLAW_A2A_GRACE": "30"}, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 100)).decode()
        found = re.fullmatch(r"dualclaw-a2a listening on (http://\S+) and, for gRPC, on (\S+)\n", line)
        assert found, line
        async with grpc.aio.insecure_channel(found[2]) as channel:
            call = A2AServiceStub(channel).SendStreamingMessage(message("conformance: slow"))
            responses = aiter(call)
            assert (await anext(responses)).HasField("task")
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
                await drained(responses)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_help_names_every_variable():
    """One look says what can be set."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualclaw_clients.a2a", "--help", stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 100)
    for name in variables_of(A2aSettings):
        assert name in out.decode(), name
