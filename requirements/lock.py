"""Renews the lock files: exact versions with hashes, for every platform, without index addresses."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXTRAS = ("server", "web", "im", "mcp", "nats")


def lock(name: str, *arguments: str) -> None:
    """Write ``requirements/<name>`` for the extras."""
    extras = [part for extra in EXTRAS for part in ("--extra", extra)]
    compile_to(name, *extras, *arguments, "pyproject.toml", "requirements/build.in")


def compile_to(name: str, *arguments: str) -> None:
    """Write ``requirements/<name>`` with uv, which serves plain pip as well."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--generate-hashes", "--quiet"]
    plain = ["--no-header", "--no-emit-index-url", "--no-annotate", "--python-version", "3.11"]
    subprocess.run([*uv, *plain, "-o", f"requirements/{name}", *arguments], cwd=HERE.parent, check=True)


if __name__ == "__main__":
    lock("run.txt")
    lock("dev.txt", "--extra", "a2a", "--group", "dev", "-c", "requirements/run.txt")
    compile_to("local.txt", "--no-deps", "--only-binary", ":all:", "requirements/local.in")
