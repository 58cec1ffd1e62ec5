"""Makes a virtual environment and installs a lock file and this project into it: uv if it can be had, else pip.

Usage: ``python3 requirements/install.py VENV LOCKFILE``. Uses nothing but the standard library.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST = (3, 11)


def main() -> None:
    """Entry point; says in one line what is missing when it cannot go on."""
    venv, lock = Path(sys.argv[1]), sys.argv[2]
    if sys.version_info < OLDEST:
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try `make PYTHON=python3.12 ...`")
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"making {venv} ...", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
        if made.returncode:
            sys.exit("the virtual environment could not be made; on Debian install python3-venv")
    print(f"installing {lock} ...", flush=True)
    installer = find_installer(python)
    environment = {**os.environ, "VIRTUAL_ENV": str(venv.resolve())}
    for arguments in (["--require-hashes", "-r", lock], ["--no-deps", "--no-build-isolation", "-e", "."]):
        done = subprocess.run(
            [*installer, "install", "--quiet", *arguments], cwd=HERE.parent, env=environment, check=False
        )
        if done.returncode:
            sys.exit(f"installing failed; the message of {' '.join(installer)} is above")


def find_installer(python: Path) -> list[str]:
    """Return the command that installs into the environment: its own uv, or pip where uv cannot be had."""
    pip = [str(python), "-m", "pip"]
    subprocess.run(
        [*pip, "install", "--quiet", "--disable-pip-version-check", "uv"], check=False, stderr=subprocess.DEVNULL
    )
    has_uv = subprocess.run([str(python), "-m", "uv", "--version"], check=False, capture_output=True)
    return [str(python), "-m", "uv", "pip"] if has_uv.returncode == 0 else [*pip, "--disable-pip-version-check"]


if __name__ == "__main__":
    main()
