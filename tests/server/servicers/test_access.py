import hashlib
import json
from pathlib import Path

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.caller import Caller
from dualclaw_server.servicers.access import Access, KeyEntry, KeysFileError, anonymous_access, read_keys
from dualclaw_server.servicers.logs import Redactor


def sum_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(
    key: str, tenant: str = "acme", subject: str = "ann", roles: tuple[str, ...] = ("user",)
) -> dict[str, object]:
    return {"key_sha256": sum_of(key), "tenant": tenant, "subject": subject, "roles": list(roles)}


@pytest.fixture
def access(tmp_path: Path) -> Access:
    path = tmp_path / "keys.json"
    entries = [
        entry("key-ann"),
        entry("key-bob", "beta", "bob", ("user", "operator")),
        entry("key-im", roles=("service",)),
    ]
    path.write_text(json.dumps(entries))
    return read_keys(path)


def refusal(access: Access, *metadata: tuple[str, str | bytes]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        access.caller(metadata)
    return caught.value


def test_a_key_stands_for_its_tenant_subject_and_roles(access: Access) -> None:
    """The right key, in any case of the scheme, gives exactly the caller of its entry."""
    assert access.caller([("authorization", "Bearer key-bob")]) == Caller(
        "beta", "bob", frozenset({"user", "operator"})
    )
    assert access.caller([("authorization", "bearer  key-ann ")]) == Caller("acme", "ann", frozenset({"user"}))


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "key-ann")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic key-ann")],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer " + sum_of("key-ann"))],
        [("authorization", "Bearer key-ann"), ("authorization", "Bearer key-bob")],
        [("authorization-bin", b"Bearer key-ann")],
    ],
)
def test_anything_but_one_known_key_is_unauthenticated(access: Access, metadata: list[tuple[str, str | bytes]]) -> None:
    """No key, a wrong one, its sum, or two of them: nobody is let in, and the refusal repeats no key."""
    error = refusal(access, *metadata)
    assert error.reason == "UNAUTHENTICATED"
    assert "key-ann" not in error.message


def test_a_service_may_speak_for_another_tenant_and_subject(access: Access) -> None:
    """The role service names whom it speaks for, either part alone or both."""
    key = ("authorization", "Bearer key-im")
    assert access.caller([key]).tenant == "acme"
    spoken = access.caller([key, ("dualclaw-tenant", "gamma"), ("dualclaw-subject", "user 7")])
    assert (spoken.tenant, spoken.subject) == ("gamma", "user 7")
    assert access.caller([key, ("dualclaw-subject", "eve")]).tenant == "acme"


def test_others_may_only_name_themselves(access: Access) -> None:
    """Naming one's own tenant and subject changes nothing; naming another is PERMISSION_DENIED."""
    key = ("authorization", "Bearer key-ann")
    assert access.caller([key, ("dualclaw-tenant", "acme"), ("dualclaw-subject", "ann")]).subject == "ann"
    assert refusal(access, key, ("dualclaw-tenant", "beta")).reason == "PERMISSION_DENIED"
    assert refusal(access, key, ("dualclaw-subject", "bob")).reason == "PERMISSION_DENIED"


@pytest.mark.parametrize("tenant", ["", " x", "a\x00b", "t" * 129])
def test_an_unusable_name_is_refused(access: Access, tenant: str) -> None:
    """A service cannot put control characters, blanks or endless names into records."""
    assert refusal(access, ("authorization", "Bearer key-im"), ("dualclaw-tenant", tenant)).reason == "INVALID_REQUEST"


def test_without_keys_everybody_on_this_machine_operates_and_others_only_use() -> None:
    """Anonymous callers share the tenant default; away from loopback they are plain users."""
    assert anonymous_access(loopback=True).caller([]).roles == {"user", "operator"}
    remote = anonymous_access(loopback=False).caller([])
    assert (remote.tenant, remote.roles) == ("default", {"user"})
    assert refusal(anonymous_access(loopback=True), ("dualclaw-tenant", "acme")).reason == "PERMISSION_DENIED"


def test_every_fault_of_a_keys_file_is_told_with_its_entry(tmp_path: Path) -> None:
    """Wrong sums, repeated ones, roles nobody knows, missing and unknown fields: all at once, no value of a sum."""
    path = tmp_path / "keys.json"
    entries: list[object] = [
        entry("a"),
        {**entry("b"), "key_sha256": "plain-key-by-mistake"},
        entry("c", roles=("admin",)),
        entry("a"),
        {"key_sha256": sum_of("d"), "tenant": "t", "rolls": []},
        entry("e", tenant=""),
        "text",
        entry("f", roles=()),
    ]
    path.write_text(json.dumps(entries))
    with pytest.raises(KeysFileError) as caught:
        read_keys(path)
    text = "\n".join(caught.value.problems)
    for fault in (
        "entry 2: key_sha256 must be 64 hex digits",
        "entry 3: roles must be",
        "entry 4: key_sha256 is the same as that of entry 1",
        "entry 5: roles is missing",
        "entry 5: subject is missing",
        "entry 5: rolls is no known field",
        "entry 6: tenant must be",
        "entry 7: must be an object",
        "entry 8: roles must be",
    ):
        assert fault in text
    assert "plain-key-by-mistake" not in text


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json", "\xff"])
def test_a_file_that_is_no_list_of_keys_is_refused(tmp_path: Path, content: str) -> None:
    """An empty or malformed file does not silently let nobody, or everybody, in."""
    path = tmp_path / "keys.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(KeysFileError):
        read_keys(path)


@pytest.mark.parametrize("metadata", [[], [("authorization", "Basic abcd")]])
def test_a_refusal_says_what_to_send_and_is_not_masked_itself(metadata: list[tuple[str, str]]) -> None:
    """The redactor, which all error texts pass, must not take the explanation for a credential."""
    access = Access(keys=(KeyEntry(b"s" * 32, Caller("t", "s", frozenset({"user"}))),))
    with pytest.raises(EngineError) as refused:
        access.caller(metadata)
    assert "Bearer KEY" in Redactor().text(refused.value.message)
