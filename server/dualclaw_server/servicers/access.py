"""Who calls: from the metadata of a call to a ``Caller``.

Keys live in a JSON file as SHA-256 sums, so the file is no secret worth stealing:
``[{"key_sha256": HEX, "tenant": STR, "subject": STR, "roles": ["user" | "operator" | "service", ...]}]``.
A key arrives as ``authorization: Bearer KEY`` and is compared by its sum, against every entry and in constant
time. The role ``service`` (a claw that speaks for many people) may name whom it speaks for in
``dualclaw-tenant`` and ``dualclaw-subject``; from anybody else these must be the caller's own.

No key, and no part of one, is ever in an error or a log.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from dualclaw.errors import EngineError
from dualclaw_server.engine.caller import ROLES, Caller

TENANT_KEY: Final = "dualclaw-tenant"
SUBJECT_KEY: Final = "dualclaw-subject"
DEFAULT_TENANT: Final = "default"
MAX_NAME_BYTES: Final = 128

_FIELDS = frozenset({"key_sha256", "tenant", "subject", "roles"})
_SUM = re.compile(r"[0-9a-fA-F]{64}")

Metadata = Iterable[tuple[str, str | bytes]]


class KeysFileError(Exception):
    """The keys file cannot be used; ``problems`` has one line for each fault, each naming its entry."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key's sum and whom it stands for."""

    key_sum: bytes
    caller: Caller


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call. With ``keys`` empty everybody is ``anonymous``; exactly one of the two is given."""

    keys: Sequence[KeyEntry] = ()
    anonymous: Caller | None = None

    def caller(self, metadata: Metadata) -> Caller:
        """Return who makes a call.

        Raises:
            EngineError: UNAUTHENTICATED without a known key; PERMISSION_DENIED when it names a tenant or
                subject it may not speak for; INVALID_REQUEST when the name is unusable.
        """
        texts: dict[str, list[str]] = {}
        for key, value in metadata:
            if isinstance(value, str):
                texts.setdefault(key, []).append(value)
        own = self.anonymous or self._holder(texts.get("authorization", []))
        return _speaking_for(own, texts)

    def _holder(self, authorization: Sequence[str]) -> Caller:
        if len(authorization) != 1:
            raise EngineError("UNAUTHENTICATED", "send one 'authorization' in the metadata, reading 'Bearer KEY'")
        scheme, _, key = authorization[0].strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise EngineError("UNAUTHENTICATED", "'authorization' in the metadata must read 'Bearer KEY'")
        key_sum = hashlib.sha256(key.strip().encode()).digest()
        found: Caller | None = None
        for entry in self.keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(entry.key_sum, key_sum):
                found = entry.caller
        if found is None:
            raise EngineError("UNAUTHENTICATED", "this key is not known here")
        return found


def anonymous_access(*, loopback: bool) -> Access:
    """Return the access without a keys file: on this machine everybody is an operator, elsewhere a user."""
    roles = frozenset({"user", "operator"}) if loopback else frozenset({"user"})
    return Access(anonymous=Caller(tenant=DEFAULT_TENANT, subject="anonymous", roles=roles))


def read_keys(path: Path) -> Access:
    """Return the access a keys file describes.

    Raises:
        KeysFileError: it cannot be read or an entry is wrong; all faults at once.
    """
    try:
        entries: object = json.loads(path.read_bytes())
    except OSError as error:
        raise KeysFileError([f"{path}: cannot be read ({error.strerror})"]) from None
    except ValueError:
        raise KeysFileError([f"{path}: is not JSON"]) from None
    if not isinstance(entries, list) or not entries:
        raise KeysFileError([f"{path}: must be a JSON list with at least one entry"])
    problems: list[str] = []
    keys: list[KeyEntry] = []
    seen: dict[bytes, int] = {}
    for number, entry in enumerate(cast("list[object]", entries), 1):
        faults = _faults(entry)
        if not faults:
            made = _entry(cast("Mapping[str, object]", entry))
            first = seen.setdefault(made.key_sum, number)
            if first != number:
                faults = [f"key_sha256 is the same as that of entry {first}"]
            keys.append(made)
        problems += [f"{path}: entry {number}: {fault}" for fault in faults]
    if problems:
        raise KeysFileError(problems)
    return Access(keys=tuple(keys))


def _faults(entry: object) -> list[str]:
    if not isinstance(entry, dict):
        return ["must be an object"]
    faults = [f"{name} is missing" for name in sorted(_FIELDS - entry.keys())]
    faults += [f"{name} is no known field" for name in sorted(map(str, entry.keys() - _FIELDS))]
    if "key_sha256" in entry and not (isinstance(entry["key_sha256"], str) and _SUM.fullmatch(entry["key_sha256"])):
        faults.append("key_sha256 must be 64 hex digits")  # never shown: it may be a key put there by mistake
    faults += [
        f"{name} must be printable text of 1 to {MAX_NAME_BYTES} bytes"
        for name in ("tenant", "subject")
        if name in entry and not (isinstance(entry[name], str) and _usable(entry[name]))
    ]
    if "roles" in entry:
        roles = entry["roles"]
        if not (isinstance(roles, list) and roles and all(isinstance(role, str) and role in ROLES for role in roles)):
            faults.append(f"roles must be a list of at least one of {', '.join(sorted(ROLES))}")
    return faults


def _entry(entry: Mapping[str, object]) -> KeyEntry:
    caller = Caller(
        tenant=str(entry["tenant"]),
        subject=str(entry["subject"]),
        roles=frozenset(cast("list[str]", entry["roles"])),
    )
    return KeyEntry(bytes.fromhex(str(entry["key_sha256"])), caller)


def _speaking_for(own: Caller, texts: Mapping[str, Sequence[str]]) -> Caller:
    tenants, subjects = texts.get(TENANT_KEY, ()), texts.get(SUBJECT_KEY, ())
    for name, values in ((TENANT_KEY, tenants), (SUBJECT_KEY, subjects)):
        if len(values) > 1 or not all(map(_usable, values)):
            raise EngineError(
                "INVALID_REQUEST", f"metadata {name} must be given once, printable, 1 to {MAX_NAME_BYTES} bytes"
            )
    tenant, subject = (*tenants, own.tenant)[0], (*subjects, own.subject)[0]
    if (tenant, subject) == (own.tenant, own.subject):
        return own
    if "service" not in own.roles:
        raise EngineError(
            "PERMISSION_DENIED",
            f"only the role service may name another tenant or subject ({TENANT_KEY}, {SUBJECT_KEY})",
        )
    return Caller(tenant=tenant, subject=subject, roles=own.roles)


def _usable(name: str) -> bool:
    return name.isprintable() and name.strip() == name and 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
