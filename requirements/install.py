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
    environment = {"UV_SYSTEM_CERTS": "1", **os.environ, "VIRTUAL_ENV": str(venv.resolve())}
    for arguments in (["--require-hashes", "-r", lock], ["--no-deps", "--no-build-isolation", "-e", "."]):
        for installer in find_installers(python):
            command = [*installer, "install", "--quiet", *arguments]
            if subprocess.run(command, cwd=HERE.parent, env=environment, check=False).returncode == 0:
                break
        else:
            sys.exit("installing failed; the messages are above")


def find_installers(python: Path) -> list[list[str]]:
    """Return the commands that install into the environment: its own uv where it can be had, then pip.

    pip comes second because it reads settings that uv does not know (pip.conf, PIP_INDEX_URL).
    """
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    uv = [str(python), "-m", "uv"]
    if subprocess.run([*uv, "--version"], check=False, capture_output=True).returncode:
        subprocess.run([*pip, "install", "--quiet", "uv"], check=False, stderr=subprocess.DEVNULL)
    has_uv = subprocess.run([*uv, "--version"], check=False, capture_output=True).returncode == 0
    return [[*uv, "pip"], pip] if has_uv else [pip]


if __name__ == "__main__":
    main()
