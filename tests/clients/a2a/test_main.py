"""Starting the A2A claw where what it needs is missing."""

import subprocess
import sys


def test_the_extra_is_named_where_its_packages_are_not_installed() -> None:
    """A line that says what to install, and no traceback."""
    hidden = "import sys; sys.modules['a2a'] = None; import dualclaw_clients.a2a.__main__"  # as if it were not there
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "dualclaw-a2a: the package a2a is not installed; it comes with the extra a2a: pip install 'dualclaw[a2a]', "
        "in a checkout .venv/bin/pip install -e '.[a2a]'\n"
    )
