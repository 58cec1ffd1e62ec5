"""Programs that tests need beside Python: without one a test is skipped loudly, or failed where it must be there."""

import os
import shutil

import pytest


def require(tool: str) -> str:
    """Return a program's path. Where REQUIRE_TOOLCHAINS is set (as in .ci/run) its absence is a failure."""
    path = shutil.which(tool)
    if path is None:
        message = f"{tool} is not installed, so what this test proves was NOT checked"
        if os.environ.get("REQUIRE_TOOLCHAINS"):
            pytest.fail(message)
        pytest.skip(message)
    return path
