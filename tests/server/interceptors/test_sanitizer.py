"""The guard next to the tools: what leaves a call is clean, short enough and never empty."""

import json
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import ContentPart, Media
from dualclaw.events import make_diagnosis
from dualclaw_server.engine.agent import Limits
from dualclaw_server.engine.interceptor import EMPTY, Observation, RunConfig, ToolRequest
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import Ask, Replace, Suspend
from dualclaw_server.engine.tool import NotDone, Tool, ToolContext, ToolRaised
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.overflow import READ_MORE, TEXTS, border
from dualclaw_server.interceptors.sanitizer import MARGIN, MAX_KEPT, ToolSanitizerInterceptor
from dualclaw_server.interceptors.secrets import Rule

from .corpus import Credential, load_credentials
from .traces import MODEL, MemoryServices, call_of, config_of, make_trace

EN = TEXTS["en"]
WORK = Tool("work", "", {"type": "object"}, lambda: None)
IMAGE = ContentPart(image=Media(media_type="image/png", data=b"password=hunter2", name="a.png"))
SECRET = "password=hunter2"
CLEAN = "password=[masked:password]"


def text(value: str) -> ContentPart:
    return ContentPart(text=value)


async def sanitize(
    observation: Observation, sanitizer: ToolSanitizerInterceptor | None = None, trace: Trace | None = None
) -> Observation:
    """Return what leaves a call that gave this; done twice, it must be the same."""
    sanitizer = sanitizer or ToolSanitizerInterceptor()
    trace = trace or make_trace()

    async def call_next(request: ToolRequest) -> Observation:
        return observation

    call = call_of(trace, name="work", tool=WORK)
    context = ToolContext("tenant", "anna", "run", "conversation", "c1", "key", {}, trace)
    cleaned = await sanitizer.intercept_tool(ToolRequest(trace, call, WORK, {}, context), call_next)
    assert await sanitizer.on_tool_call_end(trace, call, cleaned, None, 0.1) is None
    return cleaned


async def paging(
    sanitizer: ToolSanitizerInterceptor, *, run_id: str = "run", services: MemoryServices | None = None
) -> tuple[Trace, RunConfig]:
    """Return a trace whose run has the tool that pages."""
    trace = make_trace(services=services or MemoryServices(), run_id=run_id)
    return trace, await sanitizer.before_agent(trace, config_of(WORK))


async def read_more(config: RunConfig, trace: Trace, handle: str, offset: int = 0) -> str:
    tool = next(tool for tool in config.tools if tool.name == READ_MORE)
    context = ToolContext("tenant", "anna", trace.key.run_id, "conversation", "c2", "key", {}, trace)
    output = await tool.call({"handle": handle, "offset": offset}, context)
    return output.parts[0].text


# Masking


async def test_results_and_errors_are_masked() -> None:
    """Parts, summary, detail, hint and the exception behind it; code and flag stay."""
    diagnosis = make_diagnosis(
        code="tool.failed", severity="error", summary=SECRET, detail=SECRET, hint=SECRET, retryable=True
    )
    dirty = Observation([text(SECRET)], diagnosis, is_error=True, error=RuntimeError(SECRET), not_done=True)
    clean = await sanitize(dirty)
    assert clean.text == CLEAN
    assert clean.diagnosis is not None
    assert (clean.diagnosis.summary, clean.diagnosis.detail, clean.diagnosis.hint) == (CLEAN, CLEAN, CLEAN)
    assert clean.diagnosis.code == "tool.failed"
    assert clean.diagnosis.retryable
    assert clean.is_error
    assert clean.not_done
    assert str(clean.error) == f"RuntimeError: {CLEAN}"


@pytest.mark.parametrize("kind", [NotDone, TimeoutError, ConnectionError])
async def test_a_masked_exception_keeps_what_others_ask_for(kind: type[Exception]) -> None:
    """Whether nothing happened or a connection broke is no secret."""
    clean = await sanitize(failure("TOOL_FAILED", "failed", error=kind(SECRET)))
    assert isinstance(clean.error, kind)
    assert "hunter2" not in str(clean.error)


async def test_exceptions_hide_nothing_in_causes_and_notes() -> None:
    """Tracebacks print both."""
    for error in (RuntimeError("failed"), ToolRaised("failed")):
        error.__cause__ = ValueError(SECRET)
        noted = RuntimeError("failed")
        noted.add_note(SECRET)
        for dirty in (error, noted):
            clean = await sanitize(failure("TOOL_FAILED", "failed", error=dirty))
            assert clean.error is not None
            assert clean.error.__cause__ is None
            assert "hunter2" not in repr(clean.error)
    clear = RuntimeError("nothing secret")
    assert (await sanitize(failure("TOOL_FAILED", "failed", error=clear))).error is clear


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    credential=st.sampled_from(load_credentials()),
    before=st.text(max_size=20),
    after=st.text(max_size=20),
)
async def test_no_credential_gets_through(data: st.DataObject, credential: Credential, before: str, after: str) -> None:
    """In parts of one result, cut anywhere, with media between, it can be read neither apart nor joined."""
    whole = f"{before} {credential.text}{after}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    parts = [text(whole[start:end]) for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    parts.insert(data.draw(st.integers(0, len(parts))), IMAGE)
    clean = await sanitize(Observation(parts))
    assert not credential.left_in("".join(part.text for part in clean.parts))
    assert not credential.left_in(clean.text)
    assert IMAGE in clean.parts


async def test_white_space_between_texts_keeps_them_apart() -> None:
    """A part of mere white space is kept beside others, so that what follows is not taken for part of a secret."""
    secret = "rlMe0nGBWFloSbSSAkueGagHOiLem5HCxjTaNGUld10sl1bPbENFolrH9QVP"
    clean = await sanitize(Observation([text(f"aws_session_token = {secret}"), text(" "), text("0")]))
    assert "".join(part.text for part in clean.parts) == "aws_session_token = [masked:secret] 0"


async def test_arguments_of_events_are_masked_in_their_shape() -> None:
    """What can be shown is data like before; data that cannot be masked is not shown at all."""
    sanitizer = ToolSanitizerInterceptor()
    assert sanitizer.mask({"password": "x", "n": 1, "to": [SECRET]}) == {
        "password": "[masked:secret]", "n": 1, "to": [CLEAN],
    }  # fmt: skip
    assert sanitizer.mask(SECRET) == CLEAN

    class Broken(dict[str, object]):
        def items(self) -> object:  # type: ignore[override]  # it is broken
            raise RuntimeError("broken")

    assert sanitizer.mask(Broken(a=1)) == {"masked": "[masked:unreadable]"}


async def test_personal_data_and_rules_of_ones_own() -> None:
    """Cards, phones, mails and what a company alone knows are masked when asked for."""
    own = Rule("badge", re.compile(r"BADGE-\d+"), ("badge-",))
    sanitizer = ToolSanitizerInterceptor(cards=True, phones=True, mails=True, rules=[own])
    dirty = "4111 1111 1111 1111, +49 30 901820, anna@example.com, BADGE-17"
    assert (await sanitize(Observation([text(dirty)]), sanitizer)).text == (
        "[masked:card], [masked:phone], [masked:mail], [masked:badge]"
    )
    assert (await sanitize(Observation([text(dirty)]))).text == dirty


async def test_a_log_filter_masks_the_same() -> None:
    """Handlers can be given it."""
    record = logging.makeLogRecord({"msg": "with %s", "args": (SECRET,)})
    assert ToolSanitizerInterceptor().masking_filter().filter(record)
    assert record.getMessage() == f"with {CLEAN}"


# Empty and other results


@pytest.mark.parametrize("parts", [[], [text("")], [text(" \n")]])
async def test_an_empty_result_says_so(parts: list[ContentPart]) -> None:
    """Models take silence for a fault of theirs."""
    assert (await sanitize(Observation(parts))).text == EN.empty
    assert (await sanitize(Observation(parts), ToolSanitizerInterceptor(locale="zh"))).text == "[无输出]"


async def test_media_stays() -> None:
    """A picture without words is a result, and its bytes are not looked at; a name is text."""
    assert list((await sanitize(Observation([IMAGE]))).parts) == [IMAGE]
    named = ContentPart(file=Media(url="https://example.com/x", name=SECRET))
    (part,) = (await sanitize(Observation([named]))).parts
    assert part.file.name == CLEAN
    assert part.file.url == "https://example.com/x"


async def test_results_from_elsewhere_are_cleaned_when_the_call_ends() -> None:
    """What another interceptor put in place of a result, or an unknown tool's error, passes no tool."""
    sanitizer, trace = ToolSanitizerInterceptor(), make_trace()
    call = call_of(trace)
    outcome = await sanitizer.on_tool_call_end(trace, call, Observation([text(SECRET)]), None, 0.1)
    assert isinstance(outcome, Replace)
    assert isinstance(outcome.value, Observation)
    assert outcome.value.text == CLEAN
    assert await sanitizer.on_tool_call_end(trace, call, EMPTY, None, 0.1) is None


async def test_a_suspension_passes_through() -> None:
    """It is no result."""
    trace = make_trace()

    async def asking(request: ToolRequest) -> Observation:
        raise Suspend(Ask("May I?"))

    context = ToolContext("tenant", "anna", "run", "conversation", "c1", "key", {}, trace)
    request = ToolRequest(trace, call_of(trace), WORK, {}, context)
    with pytest.raises(Suspend):
        await ToolSanitizerInterceptor().intercept_tool(request, asking)


# Length


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="aé👍🏽\u200d\u0301中\n", min_size=1, max_size=600), min_size=1, max_size=4),
    limit=st.integers(400, 700),
    page=st.booleans(),
)
async def test_a_result_is_never_longer_than_the_limit(texts: list[str], limit: int, page: bool) -> None:
    """Notes included; what is short enough stays as it is, of the rest head and tail stay."""
    sanitizer = ToolSanitizerInterceptor(limit, page=page)
    trace, _ = await paging(sanitizer)
    whole = "".join(texts) if "".join(texts).strip() else ""
    clean = await sanitize(Observation([IMAGE, *map(text, texts)]), sanitizer, trace)
    joined = "".join(part.text for part in clean.parts)
    assert len(joined) <= limit
    assert clean.parts[0] == IMAGE
    if len(whole) <= limit:
        assert joined == whole
        return
    head, _, rest = joined.partition("\n[")
    assert whole.startswith(head)
    assert whole.endswith(rest.partition("]\n")[2])
    assert clean.diagnosis is not None
    assert clean.diagnosis.code == "result.truncated"


async def test_the_note_counts_what_is_left_out() -> None:
    """Head, note and tail make up the whole."""
    clean = await sanitize(Observation([text("a" * 900 + "z" * 900)]), ToolSanitizerInterceptor(500))
    head, note, tail = clean.text.split("\n")
    assert set(head) == {"a"}
    assert set(tail) == {"z"}
    assert note == EN.cut.format(count=1800 - len(head) - len(tail))


@pytest.mark.parametrize(
    ("whole", "place", "wanted"),
    [
        ("abc", 2, 2),
        ("ae\u0301b", 2, 1),
        ("a\U0001f44d\U0001f3fdb", 2, 1),  # a skin tone
        ("a\U0001f469\u200d\U0001f4bbb", 2, 1),  # before the joiner
        ("a\U0001f469\u200d\U0001f4bbb", 3, 1),  # and after it
        ("a\u2764\ufe0fb", 2, 1),
        ("a\U0001f1e9\U0001f1eab", 2, 1),  # a flag
        ("abc", 0, 0),
        ("abc", 3, 3),
        ("e" + "\u0301" * 100, 50, 50),  # nothing but one character
    ],
)
def test_a_cut_is_inside_no_character(whole: str, place: int, wanted: int) -> None:
    """Marks, skin tones, joined signs and flags stay with what they belong to."""
    assert border(whole, place) == wanted


async def test_what_is_cut_can_be_read_to_its_end() -> None:
    """Pages follow one another without a gap and each keeps to the limit; the masked text is what is kept."""
    sanitizer, services = ToolSanitizerInterceptor(1000), MemoryServices()
    trace, config = await paging(sanitizer, services=services)
    whole = "".join(f"line {number}\n" for number in range(400)) + SECRET
    clean = await sanitize(Observation([text(whole[:300]), text(whole[300:])]), sanitizer, trace)
    (name,) = services.kept
    prefix, run_id, handle = name.split("/")
    assert (prefix, run_id) == ("overflow", "run")
    assert READ_MORE in clean.text
    assert handle in clean.text
    read, offset = "", 0
    while offset < len(whole.replace(SECRET, CLEAN)):
        page, _, note = (await read_more(config, trace, handle, offset)).rpartition("\n")
        assert len(page) + 1 + len(note) <= 1000
        read += page
        offset += len(page)
    assert read == whole.replace(SECRET, CLEAN)
    assert note.endswith("this is the end]")
    asked = int(clean.text.partition("offset ")[2].partition(",")[0])
    assert "".join(part.text for part in clean.parts).startswith(f"{read[:asked]}\n[")


async def test_a_repeated_result_is_kept_once_and_noted_alike() -> None:
    """So that a loop of calls with the same long result is seen to be one."""
    sanitizer, services = ToolSanitizerInterceptor(1000), MemoryServices()
    trace, _ = await paging(sanitizer, services=services)
    first, second = [await sanitize(Observation([text("x" * 5000)]), sanitizer, trace) for _ in range(2)]
    assert first == second
    assert len(services.kept) == 1


@pytest.mark.parametrize("handle", ["0123456789abcdef", "", "../run/x", "overflow/run/x", "x" * 1000])
async def test_unknown_handles_are_refused(handle: str) -> None:
    """Also those that look like a place."""
    trace, config = await paging(ToolSanitizerInterceptor(1000))
    with pytest.raises(NotDone, match="There is no text"):
        await read_more(config, trace, handle)


async def test_handles_are_of_one_run() -> None:
    """Another run of the same tenant finds nothing under it; an offset out of range says what is right."""
    sanitizer, services = ToolSanitizerInterceptor(1000), MemoryServices()
    trace, config = await paging(sanitizer, services=services)
    await sanitize(Observation([text("x" * 5000)]), sanitizer, trace)
    handle = next(iter(services.kept)).rpartition("/")[2]
    other, _ = await paging(sanitizer, run_id="other", services=services)
    with pytest.raises(NotDone):
        await read_more(config, other, handle)
    for offset in (-1, 5000):
        with pytest.raises(NotDone, match="from 0 to 4999"):
            await read_more(config, trace, handle, offset)


async def test_without_a_way_to_keep_it_the_rest_is_left_out() -> None:
    """No tools, a tool of that name, paging switched off, or a store that is down: a plain note."""
    sanitizer = ToolSanitizerInterceptor(1000)
    mine = Tool(READ_MORE, "", {"type": "object"}, lambda: None)
    for config in (config_of(), config_of(WORK, mine)):
        trace = make_trace(services=MemoryServices())
        assert (await sanitizer.before_agent(trace, config)).tools == config.tools
        assert "read_more" not in (await sanitize(Observation([text("x" * 5000)]), sanitizer, trace)).text
    off = ToolSanitizerInterceptor(1000, page=False)
    assert (await off.before_agent(make_trace(), config_of(WORK))).tools == (WORK,)

    class Down(MemoryServices):
        async def keep(self, name: str, value: bytes) -> None:
            raise ConnectionError("the store is down")

    trace, _ = await paging(sanitizer, services=Down())
    assert "read_more" not in (await sanitize(Observation([text("x" * 5000)]), sanitizer, trace)).text


async def test_a_giant_result_is_bounded_without_uncovering_halves() -> None:
    """Of more than can be kept only the ends are looked at, and nothing next to the gap stays."""
    secret = load_credentials()[0].secret
    sanitizer, services = ToolSanitizerInterceptor(1000), MemoryServices()
    trace, _ = await paging(sanitizer, services=services)
    size = MAX_KEPT + MARGIN
    long = "eyJ" + "hbGc" * 3_000 + ".eyJ" + "zdWI" * 500 + ".abc "  # what is masked makes room for what is cut
    for shift in (4, 10, 16):  # the gap begins inside of the credential
        giant = long * 5 + "." * (size - shift - len(long) * 5) + secret + "." * 300_000
        giant += secret + long.rjust(1000 + MARGIN - shift)  # and ends inside of another one
        clean = await sanitize(Observation([text(giant[:50]), IMAGE, text(giant[50:])]), sanitizer, trace)
        assert "left out" in clean.text
        assert sum(len(part.text) for part in clean.parts) <= 1000
        assert IMAGE in clean.parts
        assert secret[-shift:] not in clean.text
    for kept in services.kept.values():
        assert len(kept) <= MAX_KEPT
        assert secret[:4] not in kept.decode()
        assert secret[-4:] not in kept.decode()


async def test_a_giant_credential_leaves_a_note_of_what_is_gone() -> None:
    """Also when what stays is short."""
    clean = await sanitize(Observation([text("ey" + "Jhbc" * 100_000 + "." + "a" * 20 + ".b")]))
    assert "left out" in clean.text


async def test_the_engines_limit_gives_way() -> None:
    """What the sanitizer lets through is not cut again; a higher limit stays."""
    sanitizer = ToolSanitizerInterceptor(20_000)
    for limit, wanted in ((16_000, 20_000), (50_000, 50_000)):
        config = RunConfig("", (), MODEL, Limits(max_result=limit), None)
        assert (await sanitizer.before_agent(make_trace(), config)).limits.max_result == wanted


def test_it_is_a_guard_and_stands_innermost() -> None:
    """Never switchable, fails closed, and everything else sees clean text."""
    sanitizer = ToolSanitizerInterceptor()
    assert sanitizer.fail_closed
    assert sanitizer.order == 1000
    assert sanitizer.name == "tool_sanitizer"
    with pytest.raises(ValueError, match="never switchable"):
        ToolSanitizerInterceptor(switchable=True)
    with pytest.raises(ValueError, match="at least 400"):
        ToolSanitizerInterceptor(399)


async def test_json_stays_json() -> None:
    """A masked result can still be read by whoever parses it."""
    data = {"user": "anna", "password": 'hun"ter2', "list": [{"api_key": "abc\n123"}]}
    clean = await sanitize(Observation([text(json.dumps(data))]))
    assert json.loads(clean.text) == {
        "user": "anna", "password": "[masked:password]", "list": [{"api_key": "[masked:secret]"}],
    }  # fmt: skip
