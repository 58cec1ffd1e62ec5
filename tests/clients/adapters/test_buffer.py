"""One assembled answer for channels that send whole messages."""

import pytest

from dualclaw import EngineEvent, InterruptItem, InterruptKind
from dualclaw.events import (
    make_delta,
    make_diagnosis,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
    to_wire,
)
from dualclaw_clients.adapters import ANSWER_WORDS, BufferAdapter
from dualclaw_clients.adapters.questions import MAX_ARGS, WORDINGS, questions_text, visible

TIMEOUT = make_diagnosis(
    code="tool.timeout", severity="error", summary="工具超时", detail="30 秒", hint="稍后再试", retryable=True
)
TIMEOUT_TEXT = "❌ 工具超时\n30 秒\n建议：稍后再试"
APPROVAL = {"id": "c1", "kind": "approval", "tool_name": "rm", "args": {"path": "/data/x"}, "prompt": "删除文件？"}
QUESTION = {"id": "c2", "kind": "question", "prompt": "哪一天？"}


def done(content: str = "", *, generating: bool = False) -> EngineEvent:
    return make_done(message_id="m", conversation_id="c", content=content, generating=generating)


def failed_step(index: int | None = 0, **changes: str) -> EngineEvent:
    diagnosis = make_diagnosis(code="tool.failed", severity="error", summary=changes["summary"]) if changes else TIMEOUT
    return make_step("skill", name="w", phase="fail", index=index, diagnosis=diagnosis)


async def assembled(*events: EngineEvent, **options: bool) -> object:
    """What the events assemble to, as events and as the dicts of an older producer alike."""
    adapter, by_dicts = BufferAdapter(**options), BufferAdapter(**options)
    for event in events:
        await adapter(event)
        wire = to_wire(event)
        assert wire is not None
        await by_dicts(wire)
    assert (adapter.received, adapter.dropped, adapter.failed) == (len(events), 0, 0)
    answer = adapter.assemble()
    assert by_dicts.assemble() == answer
    assert adapter.assemble() == answer
    return answer


# Body


async def test_deltas_accumulate_and_a_rewind_replaces_them() -> None:
    """The body is the folded text, also before done."""
    assert await assembled(make_delta("a"), make_delta("b")) == "ab"
    assert await assembled(make_delta("a"), make_rewind("x"), make_delta("b")) == "xb"
    assert await assembled() == ""


async def test_the_content_of_done_wins_when_there_is_any() -> None:
    """done.content replaces the deltas; an empty one leaves them."""
    assert await assembled(make_delta("a"), done("b")) == "b"
    assert await assembled(make_delta("a"), done()) == "a"


async def test_an_answer_alone_stays_as_it_is() -> None:
    """White space around an answer is the answer's."""
    assert await assembled(done("\n a \n\n")) == "\n a \n\n"


async def test_reasoning_comes_first_if_kept() -> None:
    """Reasoning is dropped unless it was asked for; a rewind replaces it too."""
    events = (make_reasoning("wrong"), make_rewind("", reasoning="想"), make_reasoning("想"), done("答"))
    assert await assembled(*events) == "答"
    assert await assembled(*events, keep_reasoning=True) == "想想\n\n答"


@pytest.mark.parametrize(("length", "cut"), [(20_000, False), (20_001, True), (50_000, True)])
async def test_a_body_is_cut_to_20000_characters(length: int, cut: bool) -> None:
    """Up to 20,000 code points go out whole; beyond, exactly so many and the note."""
    body = "😀" + "长" * (length - 2) + "尾"
    expected = body[:20_000] + ("\n\n内容过长已截断" if cut else "")
    assert await assembled(done(body)) == expected


async def test_what_follows_a_cut_body_is_not_cut() -> None:
    """The limit is the body's alone: failure and questions still come."""
    answer = await assembled(make_delta("x" * 20_001), failed_step(), make_error("坏了"))
    assert answer == "x" * 20_000 + f"\n\n内容过长已截断\n\n❌ 坏了\n\n{TIMEOUT_TEXT}"


# Failures


async def test_an_error_without_a_body_is_the_answer() -> None:
    """The failure's text stands for the missing answer."""
    assert await assembled(make_error("坏了")) == "❌ 坏了"
    assert await assembled(make_delta(" \n"), make_error("坏了", diagnosis=TIMEOUT)) == TIMEOUT_TEXT


async def test_an_error_follows_what_was_written() -> None:
    """Body first, then the failure line, one blank line between whatever the body ends with."""
    assert await assembled(make_delta("半句\n\n"), make_error("坏了")) == "半句\n\n❌ 坏了"


async def test_an_error_that_says_nothing_is_still_said() -> None:
    """A person is never left with an empty message after a failure."""
    assert await assembled(make_error("")) == "❌ 处理失败"


async def test_an_error_diagnosis_of_a_step_is_a_line_at_the_end() -> None:
    """Failed steps are told after the body, unless switched off; warnings and infos are not."""
    warning = make_diagnosis(code="loop.warned", severity="warning", summary="重复")
    events = (
        failed_step(0),
        make_step("kb", name="k", phase="ok", index=1, diagnosis=warning),
        make_step("kb", name="k", phase="ok", index=2, result="r"),
        failed_step(3, summary="别的"),
        done("答"),
    )
    assert await assembled(*events) == f"答\n\n{TIMEOUT_TEXT}\n\n❌ 别的"
    assert await assembled(*events, keep_diagnosis=False) == "答"


async def test_the_same_diagnosis_line_appears_once() -> None:
    """Ten timeouts are one line, and none when the failure already says the same."""
    steps = [failed_step(index) for index in range(10)]
    assert await assembled(*steps, done("答")) == f"答\n\n{TIMEOUT_TEXT}"
    assert await assembled(*steps, make_error("坏了", diagnosis=TIMEOUT)) == TIMEOUT_TEXT


async def test_a_step_that_went_well_in_the_end_leaves_no_line() -> None:
    """The last event of an index replaces earlier ones whole."""
    repaired = make_step("skill", name="w", phase="ok", index=0, result="r")
    assert await assembled(failed_step(0), repaired, done("答")) == "答"


async def test_steps_without_an_index_are_told_each() -> None:
    """An older producer's steps have no place, so none replaces another."""
    assert await assembled(failed_step(None), failed_step(None, summary="别的"), done("答")) == (
        f"答\n\n{TIMEOUT_TEXT}\n\n❌ 别的"
    )


# Media


@pytest.mark.parametrize(
    ("body", "media_type", "url"),
    [
        ('<img src="https://x/y.png">', "image", "https://x/y.png"),
        ("<img src='https://x/y.png' alt='a>b'/> 说明", "image", "https://x/y.png"),
        ('\n  <IMG alt="x"\n SRC = https://x/y.png >', "image", "https://x/y.png"),
        ('<img src="https://x/?a=1&amp;b=2">', "image", "https://x/?a=1&b=2"),
        ('<img alt="src=no" data-src="no" src=" https://x/1 " src="https://x/2">', "image", "https://x/1"),
        ('<img alt=">" src="https://x/a>b.png">', "image", "https://x/a>b.png"),
        ('<video controls src="https://x/v.mp4"></video>', "video", "https://x/v.mp4"),
        ('<video controls><source src="https://x/v.mp4" type="video/mp4"></video>', "video", "https://x/v.mp4"),
        ('<video poster="p.png">\n<track src="t.vtt"><source src="v.mp4"><source src="w.webm">', "video", "v.mp4"),
    ],
)
async def test_a_body_that_is_media_is_sent_as_such(body: str, media_type: str, url: str) -> None:
    """The dict comes at once and nothing is added, from done or from the deltas."""
    expected = {"__media__": True, "media_type": media_type, "url": url}
    assert await assembled(done(body)) == expected
    assert await assembled(make_delta(body[:7]), make_delta(body[7:])) == expected
    events = (make_reasoning("r"), failed_step(), make_interrupt([APPROVAL]), done(body, generating=True))
    assert await assembled(*events, keep_reasoning=True) == expected


@pytest.mark.parametrize(
    "body",
    [
        "<img>",
        "<img src>",
        '<img src="">',
        '<img alt="x"> <img src="https://x/y.png">',
        "<image src='x'>",
        "<imgx src='x'>",
        '<img src="https://x/y',
        "<video>no source</video><source src='x'>",
        "<video><img src='x'></video>",
        "<videos src='x'>",
        "看图：<img src='https://x/y.png'>",
        "<im",
    ],
)
async def test_a_body_without_a_media_url_is_text(body: str) -> None:
    """A tag that is unfinished, names no URL, or comes later in the text is shown as it is."""
    assert await assembled(done(body)) == body


async def test_looking_for_media_takes_linear_time() -> None:
    """Markup made to be slow to parse is answered like any text."""
    for body in ("<video>" + "<!--" * 200_000, "<img " + "a='" * 200_000, "<video " + "a=<" * 200_000):
        assert await assembled(done(body)) == body[:20_000] + "\n\n内容过长已截断"


# Waiting


async def test_an_empty_answer_says_that_generation_goes_on() -> None:
    """Background generation with nothing to show yet is said, with the diagnosis lines behind it."""
    assert await assembled(done(generating=True)) == "内容正在生成"
    assert await assembled(failed_step(), done(generating=True)) == f"内容正在生成\n\n{TIMEOUT_TEXT}"
    assert await assembled(done("答", generating=True)) == "答"
    assert await assembled(done()) == ""


async def test_an_interrupt_is_asked_and_nothing_said_of_generating() -> None:
    """A question alone is the answer."""
    answer = await assembled(make_interrupt([QUESTION]), done(generating=True))
    assert answer == "1. 哪一天？\n请直接回复您的答案"


async def test_an_approval_shows_what_would_run_and_how_to_answer() -> None:
    """The person sees prompt and arguments, and the words that answer."""
    answer = await assembled(make_delta("我要删除文件。"), make_interrupt([APPROVAL]), done("我要删除文件。"))
    assert answer == ('我要删除文件。\n\n1. 删除文件？\n工具：rm\n参数：{"path": "/data/x"}\n请回复“1 同意”或“1 拒绝”')


async def test_several_questions_are_numbered_and_come_before_the_diagnosis() -> None:
    """Each has its number, its allowed actions only, and its own paragraph."""
    items = [
        {**APPROVAL, "allowed_actions": ["approve", "edit", "skip", "respond"], "args": {}},
        QUESTION,
        {"id": "c3", "kind": "approval", "tool_name": "send"},
        {"id": "c4", "kind": "question", "allowed_actions": ["respond", "skip"]},
    ]
    assert await assembled(failed_step(), make_interrupt(items), done("答")) == (
        "答\n\n"
        "1. 删除文件？\n工具：rm\n请回复“1 同意”、“1 跳过”或“1 回答 内容”\n\n"
        "2. 哪一天？\n请回复“2 您的答案”\n\n"
        "3. 是否允许执行 send？\n请回复“3 同意”或“3 拒绝”\n\n"
        "4. 请补充信息\n请回复“4 您的答案”或“4 跳过”\n\n"
        f"{TIMEOUT_TEXT}"
    )


async def test_what_is_not_shown_whole_cannot_be_approved_here() -> None:
    """Arguments beyond 4,000 characters are cut visibly; refusing is offered, and where approving is possible."""
    answer = await assembled(make_interrupt([{**APPROVAL, "args": {"text": "x" * 5_000}}]), done())
    assert isinstance(answer, str)
    _, tool, arguments, why, how = answer.split("\n")
    assert arguments == "参数：" + '{"text": "' + "x" * (MAX_ARGS - 10) + "…"
    assert "不能在这里同意" in why
    assert (tool, how) == ("工具：rm", "请回复“1 拒绝”")
    whole = await assembled(make_interrupt([{**APPROVAL, "args": {"text": "x" * (MAX_ARGS - 12)}}]), done())
    assert isinstance(whole, str)
    assert "请回复“1 同意”" in whole


async def test_what_would_hide_or_turn_around_an_argument_is_shown_as_its_escape() -> None:
    """Right-to-left override, zero-width space and soft hyphen are seen, an emoji of several characters stays one."""
    args = {"path": "/data/\u202egnp.exe", "to": "a\u200bb\u00adc", "who": "👨\u200d👩\u200d👧"}
    answer = await assembled(make_interrupt([{**APPROVAL, "args": args}]), done())
    assert isinstance(answer, str)
    assert '{"path": "/data/\\u202egnp.exe", "to": "a\\u200bb\\u00adc", "who": "👨\u200d👩\u200d👧"}' in answer


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u200db", "a\\u200db"),
        ("a\u200cb", "a\\u200cb"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
        ("\u0915\u094d\u200d\u0937", "\u0915\u094d\u200d\u0937"),
        ("❤\ufe0f\u200d🔥 👩🏽\u200d💻", "❤\ufe0f\u200d🔥 👩🏽\u200d💻"),
        ("\u3164\u2800\u115f\uffa0", "\\u3164\\u2800\\u115f\\uffa0"),
        ("x\U000e0041\U000e0100", "x\\udb40\\udc41\\udb40\\udd00"),
        ("a\rb\x1b[2J\x07\x85", "a\\u000db\\u001b[2J\\u0007\\u0085"),
        ("line\n\ttab", "line\n\ttab"),
    ],
)
def test_nothing_hides_and_what_scripts_and_emoji_need_stays(text: str, shown: str) -> None:
    """Controls, fillers, tags and joiners that join nothing are escapes as JSON has them."""
    assert visible(text) == shown


async def test_an_expiry_is_told() -> None:
    """Who reads the question later sees whether it still stands; a time no date can hold is left out."""
    item = InterruptItem(id="c1", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, prompt="删除文件？")
    item.expire_time.FromJsonString("2026-12-01T08:30:00Z")
    assert questions_text([item]) == "1. 删除文件？\n有效期至 2026-12-01 08:30 UTC\n请回复“1 同意”或“1 拒绝”"
    item.expire_time.seconds = 2**60
    assert questions_text([item]) == "1. 删除文件？\n请回复“1 同意”或“1 拒绝”"


async def test_numbers_and_language_can_be_given() -> None:
    """A channel goes on counting where it was; everything the adapter itself says is in one table."""
    adapter = BufferAdapter(wording=WORDINGS["en"])
    await adapter(make_interrupt([APPROVAL, QUESTION, {**QUESTION, "id": "c3", "prompt": ""}]))
    assert adapter.assemble(numbers=[7, 8, 9]) == (
        '7. 删除文件？\nTool: rm\nArguments: {"path": "/data/x"}\nReply "7 ok" or "7 no"\n\n'
        '8. 哪一天？\nReply "8 YOUR ANSWER"\n\n9. Please say more\nReply "9 YOUR ANSWER"'
    )
    assert set(WORDINGS) == {"zh", "en"}
    assert all(set(wording.words) == set(ANSWER_WORDS) for wording in WORDINGS.values())


# Segments and runs


async def test_the_next_segment_starts_afresh() -> None:
    """After an answered question neither the question nor the old text or lines are told again."""
    before = (make_reasoning("r"), make_delta("旧"), failed_step(0), make_interrupt([APPROVAL]), done("旧"))
    assert await assembled(*before, make_delta("新")) == "新"
    again = (*before, failed_step(1, summary="别的"), done("新"))
    assert await assembled(*again, keep_reasoning=True) == "新\n\n❌ 别的"


async def test_events_repeated_after_a_reconnect_count_once() -> None:
    """A seq that was there already adds nothing."""
    events = [make_delta("a", seq=1), make_delta("b", seq=2)]
    assert await assembled(*events, *events, make_delta("c", seq=3)) == "abc"
    failed, end = failed_step(), done("答")
    failed.seq, end.seq = 1, 2
    assert await assembled(failed, end, failed, end) == f"答\n\n{TIMEOUT_TEXT}"


async def test_another_run_through_one_adapter_is_not_taken_for_repeats() -> None:
    """A new run counts from 1 again and its answer replaces the old one."""
    events = [failed_step(0), make_delta("旧"), done("旧"), make_delta("新")]
    for event, (run_id, seq) in zip(events, [("r1", 1), ("r1", 2), ("r1", 3), ("r2", 1)], strict=True):
        event.run_id, event.seq = run_id, seq
    assert await assembled(*events) == "新"


async def test_a_channel_without_numbered_replies_promises_none() -> None:
    """The only question is answered by a message, also beside an approval; everything else is decided elsewhere."""

    async def told(*items: dict[str, object]) -> list[str]:
        adapter = BufferAdapter(numbered_replies=False)
        await adapter(make_interrupt(items))
        text = adapter.assemble()
        assert isinstance(text, str)
        return [question.splitlines()[-1] for question in text.split("\n\n")]

    message, elsewhere = "请直接回复您的答案", "请在支持审批的渠道（例如网页）处理"
    closed = {**QUESTION, "id": "q2", "allowed_actions": ["skip"]}
    assert await told(QUESTION) == [message]
    assert await told(APPROVAL) == [elsewhere]
    assert await told(APPROVAL, QUESTION) == [elsewhere, message]
    assert await told(QUESTION, {**QUESTION, "id": "q2"}) == [elsewhere, elsewhere]
    assert await told(closed) == [elsewhere]
