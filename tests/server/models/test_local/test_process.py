"""The child process that runs the weights: how it starts, fails and ends."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from dualclaw_server.engine.model import ModelError
from dualclaw_server.models.local.process import Weights, WeightsProcess
from dualclaw_server.models.local.weights import SHA256, find_weights


def weights_at(path: Path, sha256: str = SHA256) -> Weights:
    return Weights(path, sha256, "some-name", slots=1, context=1_024)


async def test_a_file_that_is_not_the_pinned_one_is_never_loaded(tmp_path: Path) -> None:
    """Native code reads it; so a damaged file is an error that says what to do, and no second try is made of it."""
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF and then something else")
    process = WeightsProcess(weights_at(file))
    try:
        with pytest.raises(ModelError, match="damaged") as caught:
            await process.ready()
    finally:
        await process.aclose()
    assert (caught.value.reason, caught.value.retryable) == ("MODEL_UNAVAILABLE", False)
    assert caught.value.metadata["hint"].startswith("Install it anew")


async def test_a_missing_file_is_an_error_of_the_call(tmp_path: Path) -> None:
    """It was there when the server started, and is gone now."""
    process = WeightsProcess(weights_at(tmp_path / "gone.gguf"))
    try:
        with pytest.raises(ModelError, match="No such file"):
            await process.ready()
    finally:
        await process.aclose()


async def test_what_is_missing_is_named_with_how_to_install_it() -> None:
    """Both packages are looked for, and neither is imported."""
    with pytest.raises(ValueError, match=r"the weights \(package no-such-box\) and .*\(package no_such_runner\); make"):
        find_weights("no_such_box", "no_such_runner")
    assert "xllamacpp" not in sys.modules


@pytest.mark.timeout(300)
async def test_it_is_started_once_for_all_who_wait_and_anew_when_it_is_gone(weights: Path) -> None:
    """Whoever stops waiting stops nothing; a killed process is replaced, with another key, by the next call."""
    process = WeightsProcess(weights_at(weights))
    try:
        hasty = asyncio.create_task(process.ready())
        patient = [asyncio.create_task(process.ready()) for _ in range(2)]
        await asyncio.sleep(0)
        hasty.cancel()
        first, same = await asyncio.gather(*patient)
        assert first is same
        assert hasty.cancelled()
        assert first.address.startswith("http://127.0.0.1:")
        assert first.key not in repr(first)
        (child,) = children()
        os.kill(child, 9)
        while (await process.ready()).key == first.key:  # noqa: ASYNC110  # the kernel tells nobody
            await asyncio.sleep(0.01)
    finally:
        await process.aclose()
    assert children() == []
    with pytest.raises(ModelError, match="closed"):
        await process.ready()


async def test_closing_while_it_loads_ends_it_at_once(weights: Path) -> None:
    """A server that is told to stop does not wait for a model nobody needs any more."""
    process = WeightsProcess(weights_at(weights))
    waiting = asyncio.create_task(process.ready())
    async with asyncio.timeout(60):
        while not children():  # noqa: ASYNC110  # the kernel tells nobody
            await asyncio.sleep(0.01)
        await process.aclose()
        with pytest.raises((asyncio.CancelledError, ModelError)):
            await waiting
    assert children() == []


def children() -> list[int]:
    """Return the live child processes of this one that run weights."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent, state = (folder / "stat").read_text().rpartition(")")[2].split()[1::-1]
            ours = int(parent) == os.getpid() and state != "Z"
            if ours and b"models/local/child.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
