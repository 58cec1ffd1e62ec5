"""Programs that tests need beside Python: without one a test is skipped loudly, or failed where it must be there."""

import os
import shutil
from typing import NoReturn

import pytest


def require(tool: str) -> str:
    """Return a program's path; its absence is ``missing``."""
    return shutil.which(tool) or missing(f"{tool} is not installed")


def missing(what: str) -> NoReturn:
    """Skip a test for want of something. Where REQUIRE_TOOLCHAINS is set (as in .ci/run) that is a failure."""
    message = f"{what}, so what this test proves was NOT checked"
    if os.environ.get("REQUIRE_TOOLCHAINS"):
        pytest.fail(message)
    pytest.skip(message)
