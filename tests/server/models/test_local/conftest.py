"""The local model as it is installed: one process for the tests of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dualclaw_server.models.endpoint import ModelTimeouts
from dualclaw_server.models.local.model import LocalModel
from dualclaw_server.models.local.weights import find_weights
from tests.toolchains import missing

PATIENCE = 240.0
"""Seconds an answer may take; it takes two, but not on a machine with many others at work."""


@pytest.fixture(scope="session")
def weights() -> Path:
    """Return where the weights are; where they are not, tests are skipped loudly, or failed in CI."""
    try:
        return find_weights()
    except ValueError as error:
        missing(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(weights: Path) -> AsyncIterator[LocalModel]:
    """Return the model; it is loaded by the first call."""
    model = LocalModel(timeouts=ModelTimeouts(first_token=PATIENCE, idle=PATIENCE))
    yield model
    await model.aclose()
