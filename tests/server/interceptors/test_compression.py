"""Compression: when a context is made smaller, by how much, and what becomes of it."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import Message, Usage
from dualclaw_server.engine.model import ModelError, ModelOptions
from dualclaw_server.engine.tool import tool
from dualclaw_server.interceptors.compression import ContextCompressionInterceptor
from dualclaw_server.interceptors.groups import groups_of
from dualclaw_server.interceptors.summary import COMPRESSION_TEXTS
from dualclaw_server.interceptors.tokens import TokenCounter, tool_tokens

from .traces import (
    call_of,
    called,
    histories,
    history_of,
    ids,
    prompt_of,
    response,
    result,
    run_of,
    said,
    user,
)

OVERFLOW = ModelError("CONTEXT_OVERFLOW", "too long", retryable=False)


async def test_a_context_below_the_start_is_not_touched() -> None:
    """Nothing happens below 0.75 of the window: the prompt and the checkpoint stay as they are."""
    trace = run_of(history_of(5), 128_000)
    prompt = prompt_of(trace)
    before = list(prompt.messages)
    assert await ContextCompressionInterceptor().on_reason_start(trace, prompt) is None
    assert prompt.messages == before
    assert not trace.checkpoint.HasField("context")


async def test_above_the_start_it_goes_down_to_the_target_and_stays() -> None:
    """At 0.75 it goes to 0.5; the next call sees the same, and what comes later follows it."""
    trace = run_of(history_of(40), 16_000)
    prompt = prompt_of(trace)
    interceptor = ContextCompressionInterceptor()
    assert interceptor.counter.total(prompt.messages) > 12_000
    await interceptor.on_reason_start(trace, prompt)
    assert 4_000 < interceptor.counter.total(prompt.messages) <= 8_000
    assert prompt.messages[0].parts[0].text == COMPRESSION_TEXTS["en"].trimmed
    assert ids(prompt.messages)[-5:] == ["u39", "a39", "r39", "s39", "question"]
    assert trace.context() == prompt.messages
    trace.put(trace.reserve(), called("new", message_id="later"))
    assert ids(trace.context()) == [*ids(prompt.messages), "later"]
    after = prompt_of(trace)
    await interceptor.on_reason_start(trace, after)
    assert after.messages == trace.context()


async def test_the_estimate_includes_instructions_tools_and_the_answer() -> None:
    """A context that fits alone is compressed when the tools, the instructions or a long answer leave no room."""

    @tool
    def big(text: str) -> str:
        """Do it."""
        return text

    wide = dataclasses.replace(big, description="d" * 40_000)
    assert tool_tokens([wide]) > 9_000

    async def kept(**changes: object) -> int:
        trace = run_of(history_of(20), 16_000)
        prompt = dataclasses.replace(prompt_of(trace), **changes)  # type: ignore[arg-type]
        await ContextCompressionInterceptor().on_reason_start(trace, prompt)
        return len(prompt.messages)

    assert await kept() == 81
    assert await kept(tools=[wide]) < 81
    assert await kept(instructions="i" * 40_000) < 81
    assert await kept(options=ModelOptions(max_output_tokens=9_000)) < 81


async def test_a_limit_of_messages_counts_too() -> None:
    """Above max_messages it goes to target/start of them, though there is room for more tokens."""
    trace = run_of(history_of(10), 128_000)
    prompt = prompt_of(trace)
    interceptor = ContextCompressionInterceptor(max_messages=30)
    await interceptor.on_reason_start(trace, prompt)
    assert 15 < len(prompt.messages) <= 21
    before = list(prompt.messages)
    await interceptor.on_reason_start(trace, prompt)
    assert prompt.messages == before


async def test_a_prompt_that_is_mostly_tools_still_keeps_the_newest() -> None:
    """Instructions larger than the window leave messages a tenth of it: the question and the last result survive."""
    found = "r" * 4_000
    own = [user("now?", message_id="question"), called("c", message_id="call"), result("c", found, message_id="result")]
    trace = run_of(history_of(20), 16_000, *own)
    prompt = prompt_of(trace, instructions="i" * 80_000)
    await ContextCompressionInterceptor().on_reason_start(trace, prompt)
    assert ids(prompt.messages)[-3:] == ["question", "call", "result"]
    assert prompt.messages[-1].parts[0].tool_result.parts[0].text == found


async def test_results_still_to_come_find_their_place() -> None:
    """A context rewritten while calls are open gets their results, in order, once they are there."""
    trace = run_of(history_of(40), 16_000)
    first = trace.reserve(2)
    trace.put(first, called("x", message_id="call"))
    call_of(trace, "x").state.position = first + 1
    prompt = prompt_of(trace)
    await ContextCompressionInterceptor().on_reason_start(trace, prompt)
    trace.put(first + 1, result("x", "found", message_id="found"))
    assert ids(trace.context())[-2:] == ["call", "found"]


async def test_messages_of_this_call_only_are_not_kept() -> None:
    """What another interceptor added to the prompt reaches the model and not the checkpoint."""
    trace = run_of(history_of(40), 16_000)
    prompt = prompt_of(trace)
    prompt.messages.append(user("a hint"))
    await ContextCompressionInterceptor().on_reason_start(trace, prompt)
    assert prompt.messages[-1] == user("a hint")
    assert trace.context() == prompt.messages[:-1]


async def test_overflow_is_answered_harder_each_time() -> None:
    """Each refusal leaves 0.8, 0.6, 0.4, 0.25 of what is there; with nothing left to drop the answer is False."""
    trace = run_of(history_of(100), 1_000_000)
    prompt = prompt_of(trace)
    interceptor = ContextCompressionInterceptor()
    there = interceptor.counter.total(prompt.messages)
    for attempt, part in enumerate((0.8, 0.6, 0.4, 0.25, 0.25), 1):
        assert await interceptor.on_reason_retry(trace, OVERFLOW, attempt, prompt)
        left = interceptor.counter.total(prompt.messages)
        assert part * there - 500 < left <= part * there
        assert trace.context() == prompt.messages
        there = left
    while await interceptor.on_reason_retry(trace, OVERFLOW, 5, prompt):
        assert interceptor.counter.total(prompt.messages) < there
        there = interceptor.counter.total(prompt.messages)
    assert {"a99", "r99", "question"} <= set(ids(prompt.messages))


async def test_other_failures_compress_nothing() -> None:
    """Throttling that speaks of too many tokens is no overflow: the reason decides, not the words."""
    trace = run_of(history_of(40), 16_000)
    prompt = prompt_of(trace)
    throttled = ModelError("MODEL_OVERLOADED", "Too many tokens, please wait", retryable=True)
    assert not await ContextCompressionInterceptor().on_reason_retry(trace, throttled, 1, prompt)
    assert len(prompt.messages) == 161


async def test_a_refused_size_is_remembered_as_the_window() -> None:
    """A model that takes less than it says overflows once in a run, not at every step."""
    trace = run_of(history_of(40), 1_000_000)
    prompt = prompt_of(trace)
    interceptor = ContextCompressionInterceptor()
    await interceptor.on_reason_start(trace, prompt)
    refused = interceptor.counter.total(prompt.messages)
    assert await interceptor.on_reason_retry(trace, OVERFLOW, 1, prompt)
    for n in range(20):
        trace.put(trace.reserve(), said("more " * 200, message_id=f"x{n}"))
        prompt = prompt_of(trace)
        await interceptor.on_reason_start(trace, prompt)
        assert interceptor.counter.total(prompt.messages) < refused


async def test_the_vendors_count_corrects_the_estimate_upwards() -> None:
    """Where the vendor counts twice the tokens, it compresses at half the estimate; lower counts change nothing."""

    async def tokens_after(reported: int | None) -> int:
        trace = run_of(history_of(25), 20_000)
        prompt = prompt_of(trace)
        interceptor = ContextCompressionInterceptor()
        await interceptor.on_reason_start(trace, prompt)
        usage = Usage() if reported is None else Usage(input_tokens=reported)
        await interceptor.on_reason_end(trace, response("ok", usage=usage), said("ok"), 0.1)
        await interceptor.on_reason_start(trace, prompt)
        return interceptor.counter.total(prompt.messages)

    whole = TokenCounter().total(run_of(history_of(25), 0).context())
    assert await tokens_after(None) == await tokens_after(whole // 2) == whole
    assert await tokens_after(2 * whole) <= 5_000


@pytest.mark.parametrize(
    "options",
    [{"target": 0.8}, {"start": 1.1}, {"target": 0.0}, {"context_window": 0}, {"max_messages": 1}],
)
def test_numbers_of_the_interceptor_are_checked(options: dict[str, float]) -> None:
    """Numbers that make no sense together are refused, by name."""
    with pytest.raises(ValueError, match=next(iter(options))):
        ContextCompressionInterceptor(**options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(histories(), st.integers(1_000, 20_000))
async def test_the_interceptor_keeps_the_promises_for_any_history(messages: list[Message], window: int) -> None:
    """Whatever the history: order kept, groups whole, the question there, and a second time changes nothing."""
    trace = run_of(messages, window)
    interceptor = ContextCompressionInterceptor()
    prompt = prompt_of(trace)
    before = ids(prompt.messages)
    await interceptor.on_reason_start(trace, prompt)
    kept = [i for i in ids(prompt.messages) if "/" not in i]
    assert kept == [i for i in before if i in set(kept)]
    for group in groups_of(messages):
        assert len({messages[place].id in kept for place in group.places}) == 1
    assert kept[-1] == "question"
    again = prompt_of(trace)
    await interceptor.on_reason_start(trace, again)
    assert again.messages == prompt.messages
