"""Makes a virtual environment and installs a lock file into it, and this project: uv if it can be had, else pip.

Usage: ``python3 requirements/install.py VENV LOCKFILE``. Uses nothing but the standard library.

``requirements/local.txt``, the local model, is another matter: without it everything works but for that model, so
where it cannot be had this says so in one line and is content. Not where REQUIRE_TOOLCHAINS is set, as in CI.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST = (3, 11)
LOCAL = "requirements/local.txt"
WITHOUT_LOCAL = (
    "the local model cannot be installed here, so a script answers unless DUALCLAW_MODEL names a model "
    "(`make local` tries again and shows why)"
)


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
    needed = lock != LOCAL or bool(os.environ.get("REQUIRE_TOOLCHAINS"))
    print("installing the local model, 130 MB ..." if lock == LOCAL else f"installing {lock} ...", flush=True)
    if all(install(python, arguments, quiet=not needed) for arguments in steps(lock)):
        return
    if needed:
        sys.exit("installing failed; the messages are above")
    print(WITHOUT_LOCAL, flush=True)


def steps(lock: str) -> list[list[str]]:
    """Return the arguments of the installations, in their order."""
    locked = ["--require-hashes", "-r", lock]
    if lock == LOCAL:
        return [["--no-deps", "--only-binary", ":all:", *locked]]
    return [locked, ["--no-deps", "--no-build-isolation", "-e", "."]]


def install(python: Path, arguments: list[str], *, quiet: bool) -> bool:
    """Install by the first installer that can; ``quiet``: whatever it has to say."""
    venv = python.parent.parent.resolve()
    environment = {"UV_SYSTEM_CERTS": "1", **os.environ, "VIRTUAL_ENV": str(venv)}
    said = subprocess.DEVNULL if quiet else None
    return any(
        subprocess.run(
            [*installer, "install", "--quiet", *arguments], cwd=HERE.parent, env=environment, check=False, stderr=said
        ).returncode
        == 0
        for installer in find_installers(python)
    )


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
