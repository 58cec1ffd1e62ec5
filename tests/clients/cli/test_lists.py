"""runs, conversations and agents, wrong usage and settings, as processes."""

import json
import re

import pytest

from dualclaw import (
    Agent,
    ContentPart,
    Conversation,
    EffectClass,
    Error,
    InterceptorInfo,
    Message,
    Role,
    Run,
    RunState,
    StopReason,
    Tool,
    ToolCall,
    ToolResult,
)
from dualclaw.errors import EngineError


@pytest.fixture
def some_runs(fake_engine):
    fake_engine.runs = {
        f"r-{number}": Run(
            id=f"r-{number}",
            agent="assistant",
            conversation_id="c-1" if number % 2 else "c-2",
            state=RunState.RUN_STATE_FAILED if number == 3 else RunState.RUN_STATE_SUCCEEDED,
            stop_reason=StopReason.STOP_REASON_UNSPECIFIED if number == 3 else StopReason.STOP_REASON_FINISHED,
            error=Error(message="no\tmodel\x1b[2J") if number == 3 else None,
        )
        for number in range(1, 251)
    }


async def test_runs_are_lines_with_tabs_and_filters_are_passed_on(fake_engine, dualclaw, some_runs):
    """A pipe gets a line a run; a tab or control character in a text cannot break the columns."""
    ended = await dualclaw("runs", "--state", "failed", "running", "--conversation", "c-1")
    assert ended.code == 0, ended.err
    assert ended.out == "r-3\tfailed\tassistant\tc-1\t\tno model␛[2J\n"
    request = fake_engine.calls_of("ListRuns")[0].request
    assert list(request.states) == [RunState.RUN_STATE_FAILED, RunState.RUN_STATE_RUNNING]
    assert request.conversation_id == "c-1"


async def test_runs_follow_the_pages_up_to_the_limit_and_say_that_there_are_more(fake_engine, dualclaw, some_runs):
    """The limit spans pages of the engine; with --json each line is one run."""
    ended = await dualclaw("runs", "--limit", "150", "--json")
    runs = [json.loads(line) for line in ended.out.splitlines()]
    assert [run["id"] for run in runs] == [f"r-{number}" for number in range(1, 151)]
    assert runs[2]["error"] == {"message": "no\tmodel\x1b[2J"}
    assert [call.request.page_size for call in fake_engine.calls_of("ListRuns")] == [100, 50]
    assert "more than 150" in ended.err


async def test_a_conversation_is_shown_with_its_messages_in_order(fake_engine, dualclaw):
    """Texts, calls and results are readable; an unknown conversation is a refusal."""
    fake_engine.conversations["c-1"] = Conversation(id="c-1", title="Weather")
    call = ToolCall(id="k", name="weather", args_json='{"city": "上海"}')
    result = ToolResult(call_id="k", parts=[ContentPart(text="22°")])
    fake_engine.messages["c-1"] = [
        Message(role=Role.ROLE_USER, parts=[ContentPart(text="How warm?")]),
        Message(role=Role.ROLE_ASSISTANT, author="assistant", parts=[ContentPart(tool_call=call)]),
        Message(role=Role.ROLE_TOOL, parts=[ContentPart(tool_result=result)]),
        *[Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text=f"part {n}")]) for n in range(100)],
    ]
    ended = await dualclaw("conversations", "show", "c-1")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[:6] == ["user:", "How warm?", "assistant (assistant):", '▸ weather {"city": "上海"}', "tool:", "✓ 22°"]
    assert lines[-1] == "part 99"
    ended = await dualclaw("conversations")
    assert ended.out == "c-1\t\t\tWeather\n"
    ended = await dualclaw("conversations", "show", "c-9")
    assert (ended.code, ended.out) == (3, "")
    assert "UNKNOWN_CONVERSATION" in ended.err


async def test_agents_are_listed_and_one_is_shown_with_tools_and_interceptors(fake_engine, dualclaw):
    """Effect, approval and switch of each part can be seen, on a terminal as a table."""
    fake_engine.agents["assistant"] = Agent(
        name="assistant",
        description="helps",
        models=["m1", "m2"],
        tools=[Tool(name="rm", description="removes", effect=EffectClass.EFFECT_CLASS_ONCE, needs_approval=True)],
        interceptors=[
            InterceptorInfo(name="hitl", order=10, enabled=True),
            InterceptorInfo(name="audit", switchable=True),
        ],
    )
    ended = await dualclaw("agents")
    assert ended.out == "assistant\t1\tm1, m2\thitl, audit (off)\thelps\n"
    ended = await dualclaw.on_terminal("agents", "assistant")
    assert ended.code == 0
    for expected in ("assistant: helps", "models: m1, m2", "once", "asks", "removes", "hitl", "on", "audit", "off"):
        assert expected in ended.out


async def test_an_interceptor_is_switched_and_its_new_state_printed(fake_engine, dualclaw):
    """The state is passed on; what may not be switched is a refusal with the engine's words."""
    ended = await dualclaw("interceptor", "assistant", "audit", "off")
    assert (ended.code, ended.out) == (0, "interceptor audit of assistant: off\n")
    ended = await dualclaw("interceptor", "assistant", "audit", "on")
    assert (ended.code, ended.out) == (0, "interceptor audit of assistant: on\n")
    requests = [call.request for call in fake_engine.calls_of("SetInterceptorEnabled")]
    assert [(r.agent, r.interceptor, r.enabled) for r in requests] == [
        ("assistant", "audit", False),
        ("assistant", "audit", True),
    ]
    fake_engine.refuse["SetInterceptorEnabled"] = EngineError("NOT_SWITCHABLE", "hitl cannot be switched")
    ended = await dualclaw("interceptor", "assistant", "hitl", "off")
    assert (ended.code, ended.out) == (3, "")
    assert "hitl cannot be switched (NOT_SWITCHABLE)" in ended.err


async def test_tables_on_a_terminal_have_headings_and_no_empty_column(fake_engine, dualclaw, some_runs):
    """What no row says has no column; a list without rows still shows what it is a list of."""
    fake_engine.conversations["c-1"] = Conversation(id="c-1", title="Weather")
    fake_engine.agents["a"] = Agent(
        name="a", tools=[Tool(name="rm")], interceptors=[InterceptorInfo(name="hitl", switchable=True)]
    )
    for args, headings, absent in [
        (("runs",), ["run", "state", "agent", "conversation", "ended by"], ["changed"]),
        (("runs", "--conversation", "none"), ["run", "state", "changed", "ended by"], []),
        (("conversations",), ["conversation", "title"], ["active run"]),
        (("agents",), ["agent", "tools"], ["models", "description"]),
        (("agents", "a"), ["tool", "order", "interceptor", "state", "switch"], ["effect", "approval"]),
    ]:
        screen = (await dualclaw.on_terminal(*args)).out
        cells = {cell.strip() for cell in re.sub("\x1b\\[[0-9;]*m", "", screen).replace("│", "┃").split("┃")}
        assert set(headings) <= cells, screen
        assert not set(absent) & cells, screen


async def test_help_of_conversations_says_how_to_see_one(dualclaw):
    """The usage has both forms, and ``show`` is described once."""
    text = (await dualclaw("conversations", "--help")).out
    assert "[show ID]" in text.splitlines()[0]
    assert text.count("show the conversation with this id") == 1
    usage = (await dualclaw("conversations", "show", "--help")).out.splitlines()[0]
    assert usage.startswith("usage: dualclaw conversations show [")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "COMMAND"),
        (("ask",), "QUESTION"),
        (("ask", "  "), "the question is empty"),
        (("ask", "--max-steps", "0", "hi"), "no number from 1 on"),
        (("--engine", "nonsense", "runs"), "must be HOST:PORT"),
        (("interceptor", "a", "b", "maybe"), "invalid choice: 'maybe'"),
        (("resume", "r"), "ACTION is missing, one of approve, reject, edit, skip, respond"),
        (("resume", "r", "permit"), "invalid choice: 'permit'"),
        (("resume", "r", "approve", "--id", "i", "--all"), "give one of the two"),
        (("resume", "r", "approve", "--args", "{}"), "--args is for edit"),
        (("resume", "r", "edit", "--id", "i"), "edit needs --args"),
        (("resume", "r", "respond"), "respond needs --response"),
        (("resume", "r", "reject", "--response", "x"), "--response is for respond"),
        (("resume", "r", "reject", "--remember", "tenant"), "--remember is for approve"),
        (("resume", "r", "respond", "--response", "x", "--response-json", "1"), "not allowed with"),
        (("resume", "r", "--decision", "{"), "is no Decision as JSON"),
        (("resume", "r", "--decision", '{"interrupt_id": "a", "action": "permit"}'), "is no Decision as JSON"),
        (("resume", "r", "--decision", '{"interrupt_id": "a", "action": 1e999}'), "is no Decision as JSON"),
        (("resume", "r", "--decision", "null"), "is no Decision as JSON"),
        (("resume", "r", "--history-edit", '{"append": {"role": 1e999}}'), "is no HistoryEdit as JSON"),
        (("resume", "r", "--history-edit", "[" * 20_000), "is no HistoryEdit as JSON"),
        (("resume", "r", "--decision", '{"action": "approve"}'), "needs interrupt_id and action"),
        (("resume", "r", "approve", "--decision", '{"interrupt_id": "a", "action": 1}'), "in place of ACTION"),
        (("run", "show"), "RUN"),
        (("run", "restart", "r"), "invalid choice: 'restart'"),
        (("ask", "--retry-mode", "never", "hi"), "invalid choice: 'never'"),
        (("resume", "r", "--history-edit", '{"apend": {}}'), "is no HistoryEdit as JSON"),
    ],
)
async def test_wrong_usage_exits_2_and_says_what_is_right(fake_engine, dualclaw, args, problem):
    """The engine is not asked at all."""
    ended = await dualclaw(*args)
    assert (ended.code, ended.out) == (2, "")
    assert problem in ended.err
    assert "Traceback" not in ended.err
    assert fake_engine.calls == []


async def test_wrong_settings_exit_2_all_at_once_and_a_mistyped_name_is_a_warning(fake_engine, dualclaw):
    """Every wrong variable has its line; the key is used and never shown."""
    dualclaw.env |= {"DUALCLAW_API_KEY": "geheim", "DUALCLAW_ENGIN": "x", "DUALCLAW_STORE": "memory:"}
    ended = await dualclaw("agents")
    assert ended.code == 0
    assert ended.err == "dualclaw: warning: DUALCLAW_ENGIN is no setting of dualclaw; did you mean DUALCLAW_ENGINE?\n"
    assert fake_engine.calls[0].metadata["authorization"] == "Bearer geheim"
    dualclaw.env |= {"DUALCLAW_ENGINE": "x", "DUALCLAW_ENGINE_TLS": "perhaps"}
    ended = await dualclaw("agents")
    assert ended.code == 2
    assert "DUALCLAW_ENGINE: must be HOST:PORT" in ended.err
    assert "DUALCLAW_ENGINE_TLS: " in ended.err
    assert "geheim" not in ended.err


async def test_help_lists_the_exit_codes(dualclaw):
    """Scripts can be written from --help alone."""
    ended = await dualclaw("--help")
    assert ended.code == 0
    for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "130 "):
        assert f"\n  {code}" in ended.out
