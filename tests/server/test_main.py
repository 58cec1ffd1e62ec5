import asyncio
import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from dualclaw import InspectRunRequest, ListRunsRequest
from dualclaw.rpc import EngineServiceAsyncStub, OperatorServiceAsyncStub
from tests.server.conftest import ask

READY = "dualclaw-server listening on "
PATIENCE = 60.0
"""Seconds a process may take to start or to end; it takes one, but not on a machine with many others at work."""


@contextlib.asynccontextmanager
async def command(
    *arguments: str, environ: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run dualclaw-server as a process of its own, with nothing of DUALCLAW_* or OTEL_* but what is given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dualclaw_server",
        *arguments,
        env=inherited | {"DUALCLAW_MODEL": "scripted"} | dict(environ or {}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Return the address the process announces."""
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode()
    assert line.startswith(READY), line
    return line.removeprefix(READY).strip()


async def outcome(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    """Return exit code, stdout and stderr of a process that must end by itself."""
    out, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, out.decode(), errors.decode()


async def test_it_announces_its_address_answers_and_drains_on_sigterm() -> None:
    """Port 0 becomes a real one; a question is answered; SIGTERM ends it with exit code 0."""
    async with command("--listen", "127.0.0.1:0", "--store", "memory:") as process:
        address = await address_of(process)
        async with grpc.aio.insecure_channel(address) as channel:
            events = [e async for m in EngineServiceAsyncStub(channel).Run(ask("What is 6 * 7?")) for e in m.events]
        assert "42" in events[-1].done.content
        process.send_signal(signal.SIGTERM)
        code, _, errors = await outcome(process)
    assert code == 0
    records = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert [record["message"] for record in records][-1] == "stopped"
    assert "Traceback" not in errors


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Whoever cannot wait for the drain asks again."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"name": "s", "turns": [{"say": [{"text": "a"}, {"hang": True}]}]}))
    options = ("--listen", "127.0.0.1:0", "--store", "memory:", "--model", f"scripted:{script}")
    async with command(*options, environ={"DUALCLAW_GRACE": "600"}) as process:
        channel = grpc.aio.insecure_channel(await address_of(process))
        call = EngineServiceAsyncStub(channel).Run(ask())
        await call.read()
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert process.returncode is None
        process.send_signal(signal.SIGINT)
        code, _, _ = await outcome(process)
        await channel.close()
    assert code == -signal.SIGINT


async def test_wrong_settings_end_it_with_code_2_and_readable_lines() -> None:
    """Every fault is a line of its own; there is no traceback and no secret."""
    environ = {
        "DUALCLAW_LISTEN": "0.0.0.0:0",
        "DUALCLAW_GRACE": "soon",
        "DUALCLAW_MODEL_API_KEY": "sk-S3CRETVALUE",
        "DUALCLAW_KEYS_FILE": "",
    }
    async with command(environ=environ) as process:
        code, out, errors = await outcome(process)
    assert code == 2
    assert out == ""
    assert {line.split(":")[1].strip() for line in errors.splitlines()} == {"DUALCLAW_LISTEN", "DUALCLAW_GRACE"}
    assert "S3CRETVALUE" not in errors


async def test_faults_of_every_kind_and_warnings_come_in_one_go(tmp_path: Path) -> None:
    """A value, the store, the model, the agents, the keys file and a misspelt name are all told by the first try."""
    keys = tmp_path / "keys.json"
    keys.write_text("[]")
    environ = {
        "DUALCLAW_STORE": "postgres://x",
        "DUALCLAW_MODEL": "foo:bar",
        "DUALCLAW_MODLE": "x",
        "DUALCLAW_GRACE": "abc",
        "DUALCLAW_AGENTS": "no_such_module:AGENT",
        "DUALCLAW_KEYS_FILE": str(keys),
    }
    async with command(environ=environ) as process:
        code, out, errors = await outcome(process)
    assert (code, out) == (2, "")
    told = [line.removeprefix("dualclaw-server: ").partition(":")[0] for line in errors.splitlines()]
    assert sorted(told) == [
        "DUALCLAW_AGENTS",
        "DUALCLAW_GRACE",
        "DUALCLAW_KEYS_FILE",
        "DUALCLAW_MODEL",
        "DUALCLAW_STORE",
        "warning",
    ]
    assert "warning: DUALCLAW_MODLE: no such setting; did you mean DUALCLAW_MODEL?" in errors


async def test_a_warning_is_told_though_only_the_store_is_wrong() -> None:
    """Faults that show only later do not take the warnings with them."""
    async with command(environ={"DUALCLAW_STORE": "tape:x", "DUALCLAW_STOER": "x"}) as process:
        code, _, errors = await outcome(process)
    assert code == 2
    assert [line.split(": ")[1] for line in errors.splitlines()] == ["DUALCLAW_STORE", "warning"]


async def test_a_port_in_use_ends_it_with_code_1_and_one_line() -> None:
    """The address is named with the system's reason; no line of gRPC's own, nothing that looks like a crash."""
    async with command("--listen", "127.0.0.1:0", "--store", "memory:") as first:
        address = await address_of(first)
        async with command("--listen", address, "--store", "memory:") as second:
            code, out, errors = await outcome(second)
    assert (code, out) == (1, "")
    assert errors == f"dualclaw-server: cannot listen on {address}: Address already in use\n"


async def test_unknown_names_are_warned_of_in_the_log() -> None:
    """A misspelt variable is a structured warning, and the server runs."""
    environ = {"DUALCLAW_STOER": "memory:", "DUALCLAW_STORE": "memory:", "DUALCLAW_LISTEN": "127.0.0.1:0"}
    async with command(environ=environ) as process:
        await address_of(process)
        process.send_signal(signal.SIGTERM)
        code, _, errors = await outcome(process)
    warning = json.loads(errors.splitlines()[0])
    assert (code, warning["level"]) == (0, "warning")
    assert "did you mean DUALCLAW_STORE?" in warning["message"]


async def test_version_and_help_are_told() -> None:
    """Both print and exit 0 without starting anything."""
    expected = {
        "--version": ["dualclaw-server"],
        "--help": ["--listen", "DUALCLAW_TLS_CLIENT_CA (none)", "DUALCLAW_GRACE (30)", "OTEL_SERVICE_NAME"],
    }
    for option, texts in expected.items():
        async with command(option) as process:
            code, out, _ = await outcome(process)
        assert code == 0
        assert [text for text in texts if text not in out] == []


async def test_a_keys_file_is_in_force_and_no_key_is_in_the_log(tmp_path: Path) -> None:
    """Calls without the key are refused, with it answered, and the log has neither key nor sum."""
    key_sum = hashlib.sha256(b"S3CRETVALUE").hexdigest()
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"key_sha256": key_sum, "tenant": "t", "subject": "s", "roles": ["user"]}]))
    options = ("--listen", "127.0.0.1:0", "--store", "memory:")
    async with command(*options, environ={"DUALCLAW_KEYS_FILE": str(keys)}) as process:
        async with grpc.aio.insecure_channel(await address_of(process)) as channel:
            engine = EngineServiceAsyncStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.ListRuns(ListRunsRequest(), metadata=(("authorization", "Bearer wrong-S3CRETVALUE"),))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            await engine.ListRuns(ListRunsRequest(), metadata=(("authorization", "Bearer S3CRETVALUE"),))
        process.send_signal(signal.SIGTERM)
        _, _, errors = await outcome(process)
    assert "S3CRETVALUE" not in errors
    assert key_sum not in errors


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(  # noqa: N802  # the name of the rpc
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.asynccontextmanager
async def collecting(collector: Collector) -> AsyncIterator[str]:
    """Serve a collector on a free port and give its address."""
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_spans_are_exported_where_the_standard_names_say_and_before_it_is_gone() -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT alone switches the export on; the spans of the last calls are sent at the end."""
    collector = Collector()
    options = ("--listen", "127.0.0.1:0", "--store", "memory:")
    async with collecting(collector) as endpoint:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{endpoint}", "OTEL_SERVICE_NAME": "engine-of-test"}
        async with command(*options, environ=environ) as process:
            async with grpc.aio.insecure_channel(await address_of(process)) as channel:
                call = EngineServiceAsyncStub(channel).Run(ask("What is 6 * 7?"))
                events = [event async for message in call for event in message.events]
            process.send_signal(signal.SIGTERM)
            code, _, errors = await outcome(process)
    assert code == 0, errors
    (resource,) = [spans for request in collector.requests for spans in request.resource_spans]
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "engine-of-test"
    (span,) = [span for scope in resource.scope_spans for span in scope.spans]
    assert span.name == "/dualclaw.v1.EngineService/Run"
    assert {event.trace_id for event in events} == {span.trace_id.hex()}


async def test_runs_beyond_the_capacity_wait(tmp_path: Path) -> None:
    """With one place, nobody works on a second run while the first is at work."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"name": "s", "turns": [{"say": [{"text": "a"}, {"hang": True}]}]}))
    options = ("--listen", "127.0.0.1:0", "--store", "memory:", "--model", f"scripted:{script}")
    async with (
        command(*options, environ={"DUALCLAW_CAPACITY": "1", "DUALCLAW_GRACE": "0"}) as process,
        grpc.aio.insecure_channel(await address_of(process)) as channel,
        asyncio.timeout(PATIENCE),
    ):
        engine = EngineServiceAsyncStub(channel)
        first = engine.Run(ask("one"))
        while not any(event.WhichOneof("payload") == "delta" for event in (await first.read()).events):
            pass
        second = engine.Run(ask("two"))
        while len((runs := await engine.ListRuns(ListRunsRequest())).runs) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        operators = OperatorServiceAsyncStub(channel)
        seen = [await operators.InspectRun(InspectRunRequest(run_id=run.id)) for run in runs.runs]
        assert [bool(run.worker) for run in sorted(seen, key=lambda run: run.run.create_time.ToNanoseconds())] == [
            True,
            False,
        ]
        first.cancel()
        second.cancel()


async def test_it_takes_as_many_open_files_as_it_may() -> None:
    """The soft limit of open files, 1,024 on most systems, is raised to the hard one: every run needs a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    starter = f"ulimit -Sn 256; exec {sys.executable} -m dualclaw_server --listen 127.0.0.1:0 --store memory:"
    environ = {**os.environ, "DUALCLAW_MODEL": "scripted"}
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", starter, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await address_of(process)
        limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()  # noqa: ASYNC240  # no file on a disk
    finally:
        process.kill()
        await process.wait()
    [line] = [line for line in limits if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(hard), str(hard)]
