"""Tool calls of the Anthropic API: one call per block, whole arguments or none."""

import json

import pytest

from dualclaw_server.models.anthropic.answer import ANSWER_TOOL


async def test_parallel_calls_with_text_between_keep_their_order(claude, outcome_of) -> None:
    """Calls are assembled by index, also when their fragments are mixed."""
    outcome = await outcome_of(
        claude.begin(),
        *claude.text(0, "both"),
        claude.block(1, "tool_use", id="a", name="f", input={}),
        claude.block(2, "tool_use", id="b", name="g", input={}),
        claude.delta(1, "input_json_delta", partial_json='{"x"'),
        claude.delta(2, "input_json_delta", partial_json='{"y": '),
        claude.delta(1, "input_json_delta", partial_json=": 1}"),
        claude.delta(2, "input_json_delta", partial_json="2}"),
        claude.stop(1),
        claude.stop(2),
        *claude.text(3, "after"),
        claude.finish("tool_use"),
        claude.END,
    )
    assert outcome.calls == [("a", "f", '{"x": 1}'), ("b", "g", '{"y": 2}')]
    assert [kind for kind, *_ in claude.kinds_of(outcome.response)] == ["text", "tool_call", "tool_call", "text"]
    assert outcome.response.finish_reason == "tool_calls"


ARGUMENTS = {
    "PS35 only an empty fragment": (lambda claude: claude.call(0, "a", "f", ""), "{}", None),
    "no fragment": (lambda claude: claude.call(0, "a", "f"), "{}", None),
    "PS37 fragments": (lambda claude: claude.call(0, "a", "f", '{"file_', 'path":"a"}'), '{"file_path": "a"}', None),
    "whole in the start": (
        lambda claude: [claude.block(0, "tool_use", id="a", name="f", input={"x": 1}), claude.stop(0)],
        '{"x": 1}',
        None,
    ),
    "no JSON": (lambda claude: claude.call(0, "a", "f", '{"x": nope}'), "", '{"x": nope}'),
    "a list": (lambda claude: claude.call(0, "a", "f", "[1]"), "", "[1]"),
    "PS43 two stops": (lambda claude: [*claude.call(0, "a", "f", '{"x": 1}'), claude.stop(0)], '{"x": 1}', None),
    "a whole block twice": (
        lambda claude: [*claude.call(0, "a", "f", '{"x": 1}'), *claude.call(1, "a", "f", '{"x": 1}')],
        '{"x": 1}',
        None,
    ),
    "a start twice": (
        lambda claude: [claude.block(0, "tool_use", id="a", name="f", input={}), *claude.call(0, "a", "f", '{"x": 1}')],
        '{"x": 1}',
        None,
    ),
    "no stop": (lambda claude: claude.call(0, "a", "f", '{"x": 1}')[:-1], '{"x": 1}', None),
    "no index": (
        lambda claude: [
            {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "a", "name": "f"}},
            {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{}"}},
            {"type": "content_block_stop"},
        ],
        "{}",
        None,
    ),
    "a late fragment that makes it wrong": (
        lambda claude: [
            *claude.call(0, "a", "f", '{"x": 1}'),
            claude.delta(0, "input_json_delta", partial_json=', "y": 2}'),
        ],
        "",
        '{"x": 1}, "y": 2}',
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
async def test_arguments_are_joined_and_parsed_once(claude, outcome_of, case: str) -> None:
    """Every shape of one call's arguments gives one call, with its arguments or with the raw text as bad ones."""
    events, expected, bad = ARGUMENTS[case]
    outcome = await outcome_of(claude.begin(), *events(claude), claude.finish("tool_use"), claude.END)
    assert outcome.calls == [("a", "f", expected)]
    assert outcome.response.bad_arguments == ({} if bad is None else {"a": bad})


@pytest.mark.parametrize("reason", ["max_tokens", "model_context_window_exceeded", "refusal"])
@pytest.mark.parametrize("fragments", [['{"path": "/ho'], [""], []], ids=["half", "empty", "none"])
async def test_arguments_of_an_answer_that_was_cut_off_are_never_taken_for_whole(
    claude, outcome_of, reason: str, fragments: list[str]
) -> None:
    """The call is there, but with bad arguments; an earlier call of the same answer is whole."""
    outcome = await outcome_of(
        claude.begin(),
        *claude.call(0, "a", "f"),
        *claude.call(1, "b", "f", *fragments),
        claude.finish(reason),
        claude.END,
    )
    assert outcome.calls == [("a", "f", "{}"), ("b", "f", "")]
    assert outcome.response.bad_arguments == {"b": "".join(fragments)}


async def test_calls_without_a_usable_id_get_one_and_none_without_a_name_is_run(
    claude, kit, vendor, outcome_of
) -> None:
    """Ids are made unique within the message; a nameless call is a typed failure."""
    outcome = await outcome_of(
        claude.begin(),
        *claude.call(0, "a", "f", '{"x": 1}'),
        *claude.call(1, "a", "f", '{"x": 2}'),
        *claude.call(2, "", "g"),
        claude.finish(),
        claude.END,
    )
    ids = [identity for identity, _, _ in outcome.calls]
    assert ids[0] == "a"
    assert len(set(ids)) == 3
    assert all(ids)
    assert [arguments for _, _, arguments in outcome.calls] == ['{"x": 1}', '{"x": 2}', "{}"]
    outcome = await outcome_of(claude.begin(), *claude.call(0, "a", ""), claude.finish("tool_use"), claude.END)
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", True)


async def test_arguments_that_belong_to_no_call_are_a_failure(claude, outcome_of) -> None:
    """Arguments without a call in front cannot be given to one by guess."""
    outcome = await outcome_of(
        claude.begin(),
        claude.delta(0, "input_json_delta", partial_json='{"x": 1}'),
        claude.finish("tool_use"),
        claude.END,
    )
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", True)


async def test_an_open_call_is_not_whole_when_the_end_mark_comes_without_a_reason(claude, outcome_of) -> None:
    """Without a stop reason only a closed block says that a call without arguments has none."""
    outcome = await outcome_of(claude.begin(), *claude.call(0, "a", "f")[:-1], claude.END)
    assert outcome.response.bad_arguments == {"a": ""}
    outcome = await outcome_of(claude.begin(), *claude.call(0, "a", "f"), claude.END)
    assert outcome.calls == [("a", "f", "{}")]


async def test_a_structured_answer_given_as_a_call_is_text(claude, outcome_of) -> None:
    """The arguments of the answer's own tool are the text of the answer, streamed as they come; it is no call."""
    outcome = await outcome_of(
        claude.begin(), *claude.call(0, "a", ANSWER_TOOL, "", '{"x"', ": 1}"), claude.finish("tool_use"), claude.END
    )
    assert (outcome.text, outcome.calls, outcome.response.finish_reason) == ('{"x": 1}', [], "stop")
    whole = claude.block(0, "tool_use", id="a", name=ANSWER_TOOL, input={"x": 1})
    outcome = await outcome_of(claude.begin(), whole, claude.stop(0), claude.finish("tool_use"), claude.END)
    assert (json.loads(outcome.text), outcome.calls) == ({"x": 1}, [])
