"""Masking: every credential of the corpus wherever it stands, and nothing of ordinary text."""

import io
import json
import logging
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw_server.interceptors.masking import Masker, MaskingFilter
from dualclaw_server.interceptors.secrets import CARDS, MAILS, PHONES, RULES, Rule

from .corpus import Credential, load_credentials, load_ordinary

MASKER = Masker()
CREDENTIALS = load_credentials()
ROOT = Path(__file__).resolve().parents[3]

AROUND = st.text(max_size=30) | st.text(alphabet="abcXYZ019 .,;:(){}[]'\"/\\\n-_=&<>", max_size=30)


@st.composite
def hidden(draw: st.DrawFn) -> tuple[Credential, str]:
    """Return a credential and a text that holds it somewhere."""
    credential = draw(st.sampled_from(CREDENTIALS))
    before, after = draw(AROUND), draw(AROUND)
    if credential.border:
        before += draw(st.sampled_from([" ", "\n", ", "]))
    return credential, f"{before}{credential.text}{after}"


def escaped(text: str, levels: int, unicode_every: int) -> str:
    """Return a text inside so many levels of JSON, some characters of the innermost written as numbers."""
    for level in range(levels):
        text = json.dumps({"v": text})
        if level == 0 and unicode_every:
            head, body = text[:7], text[7:-2]
            units = re.findall(r"\\u....|\\.|.", body, re.DOTALL)
            body = "".join(
                f"\\u{ord(unit):04x}" if len(unit) == 1 and i % unicode_every == 0 else unit
                for i, unit in enumerate(units)
            )
            text = f"{head}{body}{text[-2:]}"
    return text


def unescaped(text: str, levels: int) -> str:
    """Return what someone reads who undoes the JSON."""
    for _ in range(levels):
        text = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), text).replace('\\"', '"')
        text = text.replace("\\n", "\n").replace("\\\\", "\\")
    return text


@pytest.mark.parametrize("credential", CREDENTIALS, ids=lambda credential: credential.kind)
def test_a_credential_is_masked(credential: Credential) -> None:
    """Alone, in a sentence and in JSON; what names it stays readable."""
    for text in (credential.text, f"see {credential.text} and go on", json.dumps([credential.text])):
        masked = MASKER.text(text)
        assert not credential.left_in(masked), masked
        assert "[masked:" in masked
        assert MASKER.text(masked) == masked


@settings(max_examples=300, deadline=None)
@given(case=hidden())
def test_a_credential_is_masked_anywhere(case: tuple[Credential, str]) -> None:
    """Whatever stands around it; and masking again changes nothing."""
    credential, text = case
    masked = MASKER.text(text)
    assert not credential.left_in(masked), (text, masked)
    assert MASKER.text(masked) == masked


@settings(max_examples=150, deadline=None)
@given(case=hidden(), levels=st.integers(1, 3), unicode_every=st.integers(0, 3))
def test_a_credential_is_masked_behind_json_escapes(
    case: tuple[Credential, str], levels: int, unicode_every: int
) -> None:
    """JSON within JSON, and characters written as numbers, hide nothing."""
    credential, text = case
    masked = MASKER.text(escaped(text, levels, unicode_every))
    assert not credential.left_in(masked)
    assert not credential.left_in(unescaped(masked, levels)), masked


@settings(max_examples=150, deadline=None)
@given(case=hidden(), data=st.data())
def test_a_credential_is_masked_when_it_is_split(case: tuple[Credential, str], data: st.DataObject) -> None:
    """Cut at any places, the pieces give it away neither apart nor joined."""
    credential, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    masked = MASKER.texts(parts)
    assert len(masked) == len(parts)
    assert not credential.left_in("".join(masked)), (parts, masked)
    assert MASKER.texts(masked) == masked


@pytest.mark.parametrize("text", load_ordinary())
def test_ordinary_text_stays(text: str) -> None:
    """Sentences, code, ids, hashes, addresses and images are no credentials."""
    assert MASKER.text(text) == text
    assert MASKER.texts([text, f"\n{text}"]) == [text, f"\n{text}"]


def test_code_stays() -> None:
    """The sources of this very server, which speak of tokens and passwords all the time, hold none but an example."""
    changed = set()
    for path in sorted((ROOT / "server").rglob("*.py")):
        text = path.read_text("utf-8")
        if MASKER.text(text) != text:
            changed |= {line for line in text.splitlines() if MASKER.text(line) != line}
    assert {line for line in changed if "hunter2" not in line} == set()


def test_data_is_masked_by_names_too() -> None:
    """Whatever stands under a telling name goes whole; the shape and everything else stay."""
    data = {
        "user": "anna",
        "password": {"value": "x", "n": [1]},
        "apiKeys": ["a", "b"],
        "token": "abc",
        "nextPageToken": "abc",
        "max_tokens": 5,
        "headers": [{"name": "Authorization", "value": "x"}, {"name": "Accept", "value": "*/*"}],
        "command": ["mysql", "--password", "x", "--host", "db"],
        "secret": None,
        "text": "password=hunter2 and more",
    }
    hidden_ = "[masked:secret]"
    assert MASKER.tree(data) == {
        **data,
        "password": hidden_,
        "apiKeys": hidden_,
        "token": hidden_,
        "headers": [{"name": "Authorization", "value": hidden_}, {"name": "Accept", "value": "*/*"}],
        "command": ["mysql", "--password", hidden_, "--host", "db"],
        "text": "password=[masked:password] and more",
    }


@pytest.mark.parametrize("credential", CREDENTIALS[::7], ids=lambda credential: credential.kind)
def test_keys_are_masked_as_well(credential: Credential) -> None:
    """A credential as a name is one too, and two that look the same stay two."""
    text = f" {credential.text}"
    masked = MASKER.tree({text: 1, f"{text} ": 2, "deep": [[{text: 3}]]})
    assert isinstance(masked, dict)
    assert len(masked) == 3
    assert not credential.left_in(json.dumps(masked))


def test_data_that_contains_itself_or_is_no_json_is_cut() -> None:
    """Masking ends, and shows nothing it did not look at."""
    loop: list[object] = []
    loop.append(loop)
    assert "[masked:too-deep]" in json.dumps(MASKER.tree(loop))
    assert MASKER.tree({"a": object(), "b": (1, 2)}) == {"a": "[masked:no-json]", "b": [1, 2]}


def test_nested_data_under_a_telling_name_is_masked_in_json_text() -> None:
    """A list of passwords in a JSON result has no value that a pattern could find."""
    masked = MASKER.text('{"passwords": ["hunter2", "swordfish"], "n": 1}')
    assert json.loads(masked) == {"passwords": "[masked:secret]", "n": 1}


@pytest.mark.parametrize(
    ("rule", "secrets", "ordinary"),
    [
        (CARDS, ["4111 1111 1111 1111", "5500005555555559", "3782-822463-10005"], ["4111 1111 1111 1112", "0" * 16]),
        (PHONES, ["+49 30 901820", "+1 (555) 555-0100", "13800138000", "(555) 555-0100"], ["1.2.3.4", "+1 and 2"]),
        (MAILS, ["anna@example.com", "a.b+c@mail.example.co.uk"], ["@decorator", "user@host"]),
    ],
    ids=["cards", "phones", "mails"],
)
def test_personal_data_is_masked_when_asked_for(rule: Rule, secrets: list[str], ordinary: list[str]) -> None:
    """Cards are told by their check digit, so that other numbers stay."""
    masker = Masker([*RULES, rule])
    for secret in secrets:
        assert masker.text(f"call {secret}, please") == f"call [masked:{rule.id}], please"
        assert MASKER.text(secret) == secret
    for text in ordinary:
        assert masker.text(f"see {text}.") == f"see {text}."


HOSTILE = [
    "a", "M", "eyJ", "-", "-----BEGIN PRIVATE KEY-----", "://a:", "a:", "password=", 'password:"', "password: ",
    "<password ", '\\"', "\\\\", "\\u0061", "sk-", "MMMMMMMMMMMMMMMMMMMMMMMMM.", "name=", "name=password ", "--token ",
    "token ", "12", "$5$", "cookie=a=", "authorization: ", '{"password":[', "login ", "api key ", "@a.", "(", "+1 ",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_texts_made_to_be_slow_are_not(piece: str) -> None:
    """What takes well under a second would take minutes if its time grew with the square of the text."""
    masker = Masker([*RULES, CARDS, PHONES, MAILS])
    text = piece * (160_000 // len(piece))
    started = time.process_time()
    masker.text(text)
    assert time.process_time() - started < 15


def test_log_records_are_masked_with_their_tracebacks() -> None:
    """Message, arguments, exception and extra texts; the rest of the line stays."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(MaskingFilter(MASKER.text))
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s %(place)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError("password=hunter2")
    except ValueError:
        logger.exception("call with %s failed", {"password": "hunter2"}, extra={"place": "token=abc123def456"})
    logger.info("%d of %d", 1, extra={"place": "here"})
    logger.info("all is well", extra={"place": "here"})
    written = stream.getvalue()
    assert "hunter2" not in written
    assert "abc123def456" not in written
    assert "ValueError: password=[masked:password]" in written
    assert "INFO '%d of %d' (its arguments do not fit: TypeError) here" in written
    assert "INFO all is well here" in written


def test_an_exception_without_a_credential_is_left_alone() -> None:
    """Other handlers can still look at it."""
    error = ValueError("nothing secret")
    record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, None)})
    assert MaskingFilter(MASKER.text).filter(record)
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize(("rule_id", "hint"), [("With Space", ""), ("ok", "Upper")])
def test_a_rule_that_would_not_work_is_refused(rule_id: str, hint: str) -> None:
    """Its id is shown, its hints are compared with lower-case text."""
    with pytest.raises(ValueError, match="rule"):
        Rule(rule_id, re.compile("x"), (hint,))
