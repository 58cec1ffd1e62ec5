"""Selection of tools: which are told of, in which order, and that the ones a model needs are never left out."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import ContentPart, Message, Role, ToolCall
from dualclaw_server.engine.tool import Kind, Tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.bm25 import Bm25, words
from dualclaw_server.interceptors.overflow import READ_MORE
from dualclaw_server.interceptors.tool_selection import ToolSelectionInterceptor

from .traces import make_trace, prompt_of, said, user


def a_tool(name: str, description: str = "", *parameters: str, kind: Kind = "skill") -> Tool:
    schema = {"type": "object", "properties": {parameter: {} for parameter in parameters}}
    return Tool(name, description, schema, lambda: None, kind=kind)


SUBJECTS = ("invoice", "customer", "ticket", "server", "holiday", "parcel", "meeting", "payment")
TOOLS = [
    a_tool(f"{verb}_{subject}", f"{verb.capitalize()} a {subject}.", f"{subject}Id")
    for subject in SUBJECTS
    for verb in ("create", "find", "delete")
]


async def chosen(
    selection: ToolSelectionInterceptor, question: str, tools: Sequence[Tool] = TOOLS, trace: Trace | None = None
) -> list[str]:
    trace = trace or make_trace(own=[user(question, message_id="question")])
    prompt = prompt_of(trace, tools=tools)
    assert await selection.on_reason_start(trace, prompt) is None
    return [tool.name for tool in prompt.tools]


async def test_few_tools_are_all_sent() -> None:
    """Up to the border nothing is chosen."""
    selection = ToolSelectionInterceptor(above=24)
    assert await chosen(selection, "the invoice") == [tool.name for tool in TOOLS]


async def test_the_tools_that_fit_the_question_are_sent_in_the_agents_order() -> None:
    """Names, descriptions and parameters count; the order stays."""
    names = await chosen(ToolSelectionInterceptor(k=3), "Where is my parcel, and who can delete parcels?")
    assert names == ["create_parcel", "find_parcel", "delete_parcel"]


async def test_names_of_parameters_are_found() -> None:
    """Split at the change of case."""
    tools = [*TOOLS, a_tool("lookup", "", "passportNumber")]
    assert "lookup" in await chosen(ToolSelectionInterceptor(k=1), "passport please", tools)


async def test_chinese_is_found_by_pairs_of_characters() -> None:
    """No blanks are needed."""
    tools = [*TOOLS, a_tool("w", "查询城市天气"), a_tool("x", "发送邮件")]
    assert await chosen(ToolSelectionInterceptor(k=1), "今天北京天气怎么样", tools) == ["w"]


async def test_newest_messages_count() -> None:
    """What the talk has come to is found too, with a question that says nothing."""
    trace = make_trace(history=[said("Shall I look for the holiday list?", message_id="a")], own=[user("yes")])
    assert "find_holiday" in await chosen(ToolSelectionInterceptor(k=3), "", trace=trace)


async def test_tools_that_were_used_stay() -> None:
    """A model goes on seeing what it has called."""
    call = ContentPart(tool_call=ToolCall(id="c", name="delete_server"))
    own = [user("the parcel"), Message(role=Role.ROLE_ASSISTANT, parts=[call])]
    names = await chosen(ToolSelectionInterceptor(k=1), "", trace=make_trace(own=own))
    assert "delete_server" in names
    assert len(names) == 2


async def test_always_and_the_engines_own_tools_stay() -> None:
    """Globs are taken; plan tools and read_more do not depend on the topic."""
    tools = [*TOOLS, a_tool("create_plan", kind="thinking"), a_tool(READ_MORE)]
    names = await chosen(ToolSelectionInterceptor(k=1, always=["*_meeting"]), "find the parcel", tools)
    assert names == ["find_parcel", "create_meeting", "find_meeting", "delete_meeting", "create_plan", READ_MORE]


async def test_ties_go_to_the_first() -> None:
    """The same question gives the same tools, also when nothing fits."""
    for selection in (ToolSelectionInterceptor(k=2), ToolSelectionInterceptor(k=2)):
        assert await chosen(selection, "???") == ["create_invoice", "find_invoice"]


async def test_embeddings_choose_where_words_cannot() -> None:
    """Relevance is the likeness of vectors, and tools are embedded once."""
    asked: list[Sequence[str]] = []

    async def embed(texts: Sequence[str]) -> list[list[float]]:
        asked.append(texts)
        return [[1.0, 0.0] if "server" in text or "machine" in text else [0.0, 1.0] for text in texts]

    selection = ToolSelectionInterceptor(k=3, embed=embed)
    for _ in range(2):
        assert await chosen(selection, "machines") == ["create_server", "find_server", "delete_server"]
    assert [len(texts) for texts in asked] == [24, 2, 2]


@pytest.mark.parametrize("fault", ["raises", "hangs", "too few"])
async def test_failing_embeddings_fall_back_to_words(fault: str) -> None:
    """A service that is down costs no run."""

    async def embed(texts: Sequence[str]) -> list[list[float]]:
        if fault == "raises":
            raise ConnectionError("down")
        if fault == "hangs":
            await asyncio.sleep(600)
        return [[1.0]]

    selection = ToolSelectionInterceptor(k=1, embed=embed, embed_timeout=0.05)
    assert await chosen(selection, "find my parcel") == ["find_parcel"]


@pytest.mark.parametrize(("k", "above"), [(0, 20), (5, 0)])
def test_numbers_out_of_range_are_refused(k: int, above: int) -> None:
    """The message says what must hold."""
    with pytest.raises(ValueError, match="must be above 0"):
        ToolSelectionInterceptor(k, above)


def test_words_of_names_and_sentences() -> None:
    """Names are split, plurals dropped, sentences cut."""
    assert list(words("getHTTPResponse_v2 find-files Straße 天气 天")) == [
        "get", "http", "response", "v2", "find", "file", "straße", "天气", "天",
    ]  # fmt: skip


def test_rare_words_count_more_than_common_ones() -> None:
    """And a document that says it oftener in fewer words comes first."""
    index = Bm25([["a", "b"], ["a", "c"], ["a", "b", "b"]])
    scores = index.scores(["b"])
    assert scores[2] > scores[0] > scores[1] == 0
    assert index.scores(["c"])[1] > index.scores(["a"])[1]
    assert Bm25([]).scores(["a"]) == []


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 10),
    question=st.text(max_size=40),
    named=st.lists(st.sampled_from([tool.name for tool in TOOLS]), max_size=3, unique=True),
    always=st.lists(st.sampled_from([tool.name for tool in TOOLS]), max_size=4, unique=True),
    used=st.lists(st.sampled_from([tool.name for tool in TOOLS]), max_size=4, unique=True),
)
async def test_never_more_than_allowed_and_never_without_what_is_named(
    k: int, question: str, named: list[str], always: list[str], used: list[str]
) -> None:
    """At most k + always + used are sent, and whatever the question names, is used or is always wanted is there."""
    calls = [ContentPart(tool_call=ToolCall(id=name, name=name)) for name in used]
    own = [user(" ".join([question, *named])), Message(role=Role.ROLE_ASSISTANT, parts=calls)]
    selection = ToolSelectionInterceptor(k, 20, always)
    names = await chosen(selection, "", trace=make_trace(own=own))
    assert {*named, *always, *used} <= set(names)
    assert len(names) <= max(k, len(named)) + len(always) + len(used)
    assert names == [tool.name for tool in TOOLS if tool.name in names]
    assert names == await chosen(selection, "", trace=make_trace(own=own))
