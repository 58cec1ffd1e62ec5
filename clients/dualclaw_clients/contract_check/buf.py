"""buf, run as a program: finds it, has it build schemas and judge breaking changes, and says who its findings hit.

BufError   buf is missing, or could not do what it was asked
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError

from dualclaw_clients.contract_check.findings import Finding
from dualclaw_clients.contract_check.schema import Schema

TIMEOUT: Final = 120
"""Seconds buf may take for one thing."""
_FOUND: Final = 100
"""buf's exit code when it has findings."""
_BYTES: Final = "Stored logs and clients that are not updated at the same moment: "
_CODE: Final = "Clients in Go, Java, TypeScript and Python: "
WHO: Final[Mapping[str, str]] = MappingProxyType(
    {
        "FIELD_NO_DELETE": f"{_BYTES}what they hold or send in it is lost. {_CODE}uses of it do not compile.",
        "FIELD_SAME_TYPE": f"{_BYTES}its bytes are misread or refused. {_CODE}its getter has another type.",
        "FIELD_SAME_NAME": "Everybody who reads JSON: the key has another name. " + f"{_CODE}the getter is gone.",
        "FIELD_SAME_JSON_NAME": "Everybody who reads protobuf JSON: the key has another name.",
        "FIELD_SAME_CARDINALITY": f"{_CODE}its getter has another shape (value, pointer, list). Old front-ends: unset "
        "and zero become one, or stop being so.",
        "FIELD_SAME_ONEOF": f"{_CODE}the union no longer has it; setting it clears other fields, or stops doing so.",
        "ENUM_VALUE_NO_DELETE": f"{_BYTES}they hold a number without a meaning. Old front-ends: its word is not sent.",
        "ENUM_VALUE_SAME_NAME": f"Old front-ends: they get a word they do not know. {_CODE}the constant is gone.",
        "RPC_NO_DELETE": "Older clients: the call fails with UNIMPLEMENTED.",
        "RPC_SAME_REQUEST_TYPE": f"Older clients: their requests are misread. {_CODE}the call does not compile.",
        "RPC_SAME_RESPONSE_TYPE": f"Older clients: answers are misread. {_CODE}the call does not compile.",
        "RPC_SAME_SERVER_STREAMING": "Older clients: they read one answer where many come, or the reverse.",
        "RPC_SAME_CLIENT_STREAMING": "Older clients: they send one request where many are expected, or the reverse.",
        "SERVICE_NO_DELETE": "Older clients: every call of it fails with UNIMPLEMENTED.",
        "MESSAGE_NO_DELETE": f"{_CODE}imports of it break; so do moved messages, because code follows files.",
        "ENUM_NO_DELETE": f"{_CODE}imports of it break.",
        "FILE_NO_DELETE": f"{_CODE}imports of its generated code break.",
        "FILE_SAME_GO_PACKAGE": "Go clients: every import changes.",
        "FILE_SAME_JAVA_PACKAGE": "Java clients: every import changes.",
        "FILE_SAME_JAVA_MULTIPLE_FILES": "Java clients: every import changes.",
        "FILE_SAME_PACKAGE": f"{_CODE}every name changes, and so do the paths of the calls.",
        "COMPILE": "Everybody: the protos do not compile.",
    }
)
"""buf's rules and who notices when they are broken."""
_ANYBODY: Final = "Clients that are not updated at the same moment, and stored logs."


class BufError(Exception):
    """buf is missing, or could not do what it was asked; says what to do."""


def find_buf() -> str:
    """Return the path of buf: on PATH, or beside this Python, where the package buf-bin puts it. Raises BufError."""
    beside = Path(sys.executable).parent
    found = shutil.which("buf") or shutil.which("buf", path=str(beside))
    if found is None:
        raise BufError("buf is not there; install it with `pip install buf-bin`, or put buf on PATH")
    return found


def build(buf: str, source: str) -> Schema:
    """Return the schema of anything buf can read: a folder, an image, a git address. Raises BufError."""
    done = _run(buf, "build", source, "-o", "-#format=binpb", "--as-file-descriptor-set")
    if done.returncode != 0:
        raise BufError(f"{source} cannot be built: {_words(done)}")
    try:
        return Schema(FileDescriptorSet.FromString(done.stdout))
    except DecodeError:
        raise BufError(f"{source}: buf gave no file descriptor set") from None


def breaking(buf: str, path: str, against: str) -> list[Finding]:
    """Return what buf finds breaking, by the rules of the folder's buf.yaml (by default FILE). Raises BufError."""
    done = _run(buf, "breaking", path, "--against", against, "--error-format", "json")
    if done.returncode not in (0, _FOUND):
        raise BufError(f"buf breaking could not compare: {_words(done)}")
    return [_finding(line) for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]


def _finding(line: str) -> Finding:
    try:
        found = json.loads(line)
        rule, what = str(found["type"]), str(found["message"])
    except (ValueError, KeyError, TypeError):
        raise BufError(f"buf said something that is no finding: {line[:200]}") from None
    place, number = str(found.get("path", "")), int(found.get("start_line", 0))
    where = f"{place}:{number}" if number else place
    return Finding(rule, where or "the contract", what, WHO.get(rule, _ANYBODY), "buf", place, number)


def _run(buf: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run([buf, *arguments], capture_output=True, timeout=TIMEOUT, check=False)  # noqa: S603  # no shell; the arguments are the user's own
    except subprocess.TimeoutExpired:
        raise BufError(f"buf {arguments[0]} took longer than {TIMEOUT} s") from None
    except OSError as error:
        raise BufError(f"{buf} cannot be run: {error.strerror}") from None


def _words(done: "subprocess.CompletedProcess[bytes]") -> str:
    return (done.stderr or done.stdout).decode("utf-8", "replace").strip()[:2000] or f"exit code {done.returncode}"
