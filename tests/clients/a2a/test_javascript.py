"""The protocol's own JavaScript client against the claw and a real engine, by JSON-RPC and by gRPC."""

import asyncio
import json
import subprocess

import pytest

from tests.toolchains import require

from .conftest import BINDINGS, NODE

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def node() -> str:
    """Return node, with the packages of the folder installed from their lock file."""
    path, npm = require("node"), require("npm")
    if not (NODE / "node_modules" / ".package-lock.json").exists():
        command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=NODE, check=True, capture_output=True, timeout=300)
    return path


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_javascript_client_streams_answers_resumes_resubscribes_and_cancels(node, served_claw, binding):
    """Every scenario, as the SDK's client puts it together: nothing lost, nothing doubled, every state as it should."""
    process = await asyncio.create_subprocess_exec(
        node, "client.mjs", served_claw.url, binding,
        cwd=NODE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    seen = {line.pop("name"): line for line in map(json.loads, out.decode().splitlines())}
    assert seen["text"]["kinds"][0] == "task"
    assert seen["text"]["states"] == ["SUBMITTED", "WORKING", "COMPLETED"]
    assert seen["text"]["artifacts"] == {"answer-1": "Hello 你好 🙂"}
    assert seen["rewind"]["artifacts"] == {"answer-1": "This is right."}
    assert seen["asked"]["states"][-1] == "INPUT_REQUIRED"
    assert "`approve pay-a`" in seen["asked"]["status"]
    assert seen["unclear"]["states"] == ["INPUT_REQUIRED"]
    assert "That was no answer" in seen["unclear"]["status"]
    assert seen["approved"]["id"] == seen["asked"]["id"]
    assert seen["approved"]["states"][-1] == "COMPLETED"
    assert list(seen["approved"]["artifacts"].values()) == ["One moment. ", "Done: paid 5 to a."]
    rest, numbers = seen["rest"]["artifacts"]["answer-1"], "".join(f"{number:03} " for number in range(200))
    assert seen["rest"]["kinds"][0] == "task"
    assert seen["rest"]["states"][-1] == "CANCELED"
    assert numbers.startswith(rest)
    assert rest.startswith(seen["part"]["artifacts"]["answer-1"])
    assert seen["cancelled"] == {"state": "TASK_STATE_CANCELED", "text": rest}
    assert seen["got"] == {"state": "TASK_STATE_COMPLETED", "artifacts": ["One moment. ", "Done: paid 5 to a."]}
    assert seen["missing"]["error"].endswith("TaskNotFoundError")
