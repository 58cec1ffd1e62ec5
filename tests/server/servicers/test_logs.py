import io
import json
import logging
import time
from collections.abc import Sequence

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.caller import Caller
from dualclaw_server.servicers.access import Access, KeyEntry
from dualclaw_server.servicers.logs import JsonFormatter, Redactor


@pytest.mark.parametrize(
    "text",
    [
        "authorization: Bearer S3CRETVALUE",
        "authorization: Token sk-S3CRETVALUE",
        "Authorization: ApiKey S3CRETVALUE==",
        "authorization: Custom-Scheme S3CRETVALUE",
        "authorization: S3CRETVALUE was refused",
        "authorization: token 'S3CRETVALUE'",
        '{"Proxy-Authorization": "Token  S3CRETVALUE"}',
        "metadata (('authorization', b'Token S3CRETVALUE'),)",
        "metadata (('authorization', 'Bearer S3CRETVALUE'),)",
        "GET https://u:S3CRETVALUE@example.com/v1",
        '{"api_key": "S3CRETVALUE"}',
        "DUALCLAW_MODEL_API_KEY=S3CRETVALUE",
        "X-Api-Key: S3CRETVALUE",
        "password='S3CRETVALUE' host=x",
        "Incorrect API key provided: sk-S3CRETVALUE123456",
        "token=S3CRETVALUE&x=1",
        "the vendor said plain-S3CRETVALUE is no good",
    ],
)
def test_credentials_are_masked_wherever_they_stand(text: str) -> None:
    """Headers, URLs, JSON, assignments, vendors' marks and the engine's own key: none survives."""
    clean = Redactor(["plain-S3CRETVALUE"]).text(text)
    assert "S3CRETVALUE" not in clean
    assert "***" in clean


@pytest.mark.parametrize(
    "text", ["used 17 tokens: 12 in, 5 out", "the bearer of this", "max_tokens=400", "see https://example.com:443/x"]
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    """Text that only sounds like a credential is not mangled."""
    assert Redactor(["x"]).text(text) == text


def test_the_scheme_of_an_authorization_stays_readable() -> None:
    """Which scheme was used is no secret and helps; what follows it is the value."""
    assert Redactor().text("authorization: Token sk-abc, x") == "authorization: Token ***, x"


@pytest.mark.parametrize("metadata", [(), (("authorization", "sk-S3CRETVALUE"),), (("authorization", "Bearer x"),)])
def test_how_to_send_a_key_is_told_unmasked(metadata: Sequence[tuple[str, str]]) -> None:
    """The refusals of callers without a known key survive the redactor, header name and scheme included."""
    access = Access(keys=[KeyEntry(b"0" * 32, Caller(tenant="t", subject="s", roles=frozenset({"user"})))])
    with pytest.raises(EngineError) as caught:
        access.caller(metadata)
    assert Redactor().text(caught.value.message) == caught.value.message
    for form in ("authorization: Bearer KEY", "authorization: Bearer <KEY>"):
        assert Redactor().text(form).startswith("authorization: Bearer ")
    assert Redactor().text("send authorization: Bearer KEY") == "send authorization: Bearer KEY"


def test_a_line_about_a_run_has_its_names_as_fields() -> None:
    """Run, tenant, agent and reason given as extras can be searched for; other extras are left out."""
    record = logging.makeLogRecord(
        {"msg": "failed", "run_id": "r1", "tenant": "t", "agent": "", "reason": "MODEL_AUTH", "other": "x"}
    )
    line = json.loads(JsonFormatter(Redactor()).format(record))
    assert {name: line[name] for name in line.keys() - {"time", "level", "logger", "message"}} == {
        "run_id": "r1",
        "tenant": "t",
        "reason": "MODEL_AUTH",
    }


def test_a_log_line_is_one_json_object_with_trace_and_redacted_traceback() -> None:
    """Message and traceback are masked, line breaks stay inside the JSON, the trace id is a field."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(Redactor()))
    logger = logging.Logger("engine")
    logger.addHandler(handler)
    try:
        raise ValueError("401 for Bearer S3CRETVALUE\nsecond line")
    except ValueError:
        logger.exception("calling with api_key=%s failed", "S3CRETVALUE", extra={"trace_id": "ab" * 16})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert (record["level"], record["logger"], record["trace_id"]) == ("error", "engine", "ab" * 16)
    assert "ValueError" in record["exception"]
    assert "S3CRETVALUE" not in lines[0]


@pytest.mark.parametrize(
    "piece",
    [
        "a-",
        "_a-",
        "token ",
        "://a:",
        "basic ",
        "authorization: ",
        "authorization:",
        "authorization: key ",
        "authorization='",
        "authorization: abc abc ",
        "authorization        ",
        "authorization: \t   \t    ",
        "authorization: token        a ",
    ],
)
def test_masking_takes_time_in_proportion_to_the_text(piece: str) -> None:
    """Texts of callers and tools pass here on the event loop: none may hold it up, however it is made."""
    begun = time.process_time()
    Redactor(["plain-S3CRETVALUE"]).text(piece * 10_000)
    assert time.process_time() - begun < 10  # in proportion to its square it would take minutes
