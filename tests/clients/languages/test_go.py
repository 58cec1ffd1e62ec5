"""The Go client: its own tests against the vectors and a live engine, and its gateway frame by frame beside ours."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from dualclaw_clients.conformance.catalogue import checks_of
from tests.toolchains import require

from .conftest import ROOT, LiveEngine

GO = ROOT / "clients/go"
SCENARIOS = ("text", "tool", "args", "approval", "question", "rewind", "error", "long", "loop")
REFUSED: tuple[Mapping[str, object], ...] = (
    {"content": "hi", "agent": "nobody"},
    {"content": "", "agent": 5},
    {"CONTENT": "hi"},
    {"content": "hi", "conversation_id": 1.5, "request_id": []},
    {"content": "hi", "conversation_id": "never-created"},
)


def go_environment(engine: LiveEngine) -> dict[str, str]:
    return {**os.environ, **engine.environment, "GOFLAGS": "-mod=readonly"}


@pytest.mark.timeout(1500)
def test_go_client(live_engine: LiveEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """``go test`` passes, with every golden vector and every live test among what it ran, and none skipped."""
    done = subprocess.run(
        [require("go"), "test", "-count=1", "-json", "./..."],
        cwd=GO,
        env=go_environment(live_engine),
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    printed = "".join(event.get("Output", "") for event in events)
    assert done.returncode == 0, printed[-8000:] + done.stderr[-4000:]
    passed = [event["Test"] for event in events if event["Action"] == "pass" and "Test" in event]
    skipped = [event["Test"] for event in events if event["Action"] == "skip" and "Test" in event]
    vectors = sum(len(json.loads(path.read_text())) for path in (ROOT / "proto/vectors").glob("*.json"))
    assert skipped == []
    assert sum(name.startswith("TestGoldenVectors/") for name in passed) == vectors
    live = sum(name.startswith("TestLive") for name in passed)
    assert live >= 10
    with capsys.disabled():
        sys.stdout.write(f"\ngo: {len(passed)} tests, {vectors} of them golden vectors, {live} live\n")


@pytest.mark.timeout(1000)
def test_generated_go_code_is_that_of_the_protos() -> None:
    """The committed stubs are what the generators make of the protos."""
    done = subprocess.run(
        ["bash", "generate.sh", "--check"],
        cwd=GO,
        env={
            **os.environ,
            "PATH": f"{os.path.dirname(require('go'))}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@contextmanager
def gateway(command: list[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Run a gateway; gives its address."""
    with subprocess.Popen(command, cwd=GO, env=dict(environment), stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().split()[-1]
        finally:
            child.terminate()


def frames(address: str, body: Mapping[str, object]) -> bytes:
    request = urllib.request.Request(  # noqa: S310  # loopback
        f"{address}/messages/stream", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # loopback
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return answer.read()


@pytest.fixture(scope="module")
def go_gateway(live_engine: LiveEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the Go gateway, built and started before the live engine."""
    binary = os.fspath(tmp_path_factory.mktemp("gateway") / "sse-gateway")
    subprocess.run(
        [require("go"), "build", "-o", binary, "./cmd/sse-gateway"], cwd=GO, env=go_environment(live_engine), check=True
    )
    with gateway([binary], gateway_environment(live_engine)) as address:
        yield address


def gateway_environment(engine: LiveEngine) -> dict[str, str]:
    return {**os.environ, **engine.environment, "DUALCLAW_WEB_LISTEN": "127.0.0.1:0", "PYTHONUNBUFFERED": "1"}


@pytest.mark.timeout(1000)
def test_the_go_gateway_gives_the_frames_of_ours(live_engine: LiveEngine, go_gateway: str) -> None:
    """The same run, asked of both gateways with one request_id, comes in the same bytes; so does a refusal."""
    with gateway([sys.executable, "-m", "dualclaw_clients.web"], gateway_environment(live_engine)) as own:
        for name in SCENARIOS:
            body = {"content": f"conformance: {name}", "agent": "conformance", "request_id": f"go-gateway-{name}"}
            first = frames(own, body)
            assert first.startswith(b"data: ")
            assert frames(go_gateway, body) == first
        for refused in REFUSED:
            assert frames(go_gateway, refused) == frames(own, refused)


@pytest.mark.timeout(1000)
def test_the_go_gateway_passes_the_conformance_kit(go_gateway: str) -> None:
    """``dualclaw conformance web`` passes every check of the original route, and leaves none out."""
    done = subprocess.run(
        [sys.executable, "-m", "dualclaw_clients.cli", "conformance", "web", go_gateway, "--route", "original"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(checks_of('original'))} passed, 0 failed, 0 not checked" in done.stdout
