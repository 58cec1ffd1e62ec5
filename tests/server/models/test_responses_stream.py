"""Answers of the Responses API: what comes out, and how events find their items."""

import copy
import json
import random

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw import ContentPart
from dualclaw_server.engine.model import ModelError, ModelRequest
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import signature_for
from dualclaw_server.models.responses.api import ResponsesApi
from dualclaw_server.models.sse import ServerEvent
from tests.server.models.conftest import item_added as added
from tests.server.models.conftest import item_call as called
from tests.server.models.conftest import item_delta as delta
from tests.server.models.conftest import item_done as finished
from tests.server.models.conftest import response_over as over
from tests.server.models.conftest import responses_outcome as played


def parts_of(outcome) -> list[ContentPart]:
    assert outcome.response is not None, outcome.error
    return list(outcome.response.message.parts)


async def test_a_whole_answer_with_everything_in_it() -> None:
    """Reasoning, text and parallel calls keep their order; usage, ids and model are there."""
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 8},
    }
    outcome = await played(
        {"type": "response.created", "response": {"id": "resp_1", "model": "m-1", "status": "in_progress"}},
        added(0, "reasoning", "rs_1", summary=[], encrypted_content="HALF"),
        delta("reasoning_summary_text", "First.", 0, "rs_1", summary_index=0),
        delta("reasoning_summary_text", "Then.", 0, "rs_1", summary_index=1),
        finished(0, "reasoning", "rs_1", summary=[{"text": "First."}, {"text": "Then."}], encrypted_content="WHOLE"),
        added(1, "message", "msg_1", content=[]),
        delta("output_text", "Let ", 1, "msg_1", content_index=0),
        delta("output_text", "me.", 1, "msg_1", content_index=0),
        {
            "type": "response.output_text.done",
            "output_index": 1,
            "item_id": "msg_1",
            "content_index": 0,
            "text": "Let me.",
        },
        *called(2, "fc_1", "call_a", '{"x": 1}'),
        *called(3, "fc_2", "call_b", '{"x": 2}'),
        over(usage=usage),
    )
    assert (outcome.reasoning, outcome.text) == ("First.\n\nThen.", "Let me.")
    assert outcome.calls == [("call_a", "f", '{"x": 1}'), ("call_b", "f", '{"x": 2}')]
    kinds = [part.WhichOneof("part") for part in parts_of(outcome)]
    assert kinds == ["reasoning", "text", "tool_call", "tool_call"]
    thought = parts_of(outcome)[0].reasoning
    assert (thought.id, thought.redacted, thought.text) == ("rs_1", b"WHOLE", "First.\n\nThen.")
    assert signature_for("responses", thought) == "summary"
    assert signature_for("chat", thought) is None
    response = outcome.response
    assert (response.finish_reason, response.model, response.request_id) == ("tool_calls", "m-1", "resp_1")
    assert MessageToDict(response.usage, preserving_proto_field_name=True) == {
        "input_tokens": 10,
        "output_tokens": 20,
        "reasoning_tokens": 8,
        "cached_tokens": 4,
    }


async def test_sealed_reasoning_goes_back_as_it_came(kit, vendor) -> None:
    """What the finished item held is the item of the next request, and the answer is not stored at the vendor."""
    script = kit.streams(
        added(0, "reasoning", "rs_1", summary=[]),
        finished(0, "reasoning", "rs_1", summary=[{"type": "summary_text", "text": "S"}], encrypted_content="E"),
        *called(1, "fc_1", "call_a"),
        over(),
        done=False,
    )
    async with vendor(script) as served, kit.api_at(served, ResponsesApi()) as model:
        first = await kit.play(model)
        await kit.play(model, ModelRequest([first.response.message]))
    sent = served.asked[1].json
    assert sent["store"] is False
    assert sent["input"][0] == {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "S"}],
        "encrypted_content": "E",
    }
    assert [item["type"] for item in sent["input"]] == ["reasoning", "function_call", "function_call_output"]


SEED = 20240229

ROUTES = {
    "by id, interleaved": [
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        added(1, "function_call", "fc_2", call_id="b", name="g"),
        delta("function_call_arguments", '{"x"', 0, "fc_1"),
        delta("function_call_arguments", '{"y"', 1, "fc_2"),
        delta("function_call_arguments", ": 1}", 0, "fc_1"),
        delta("function_call_arguments", ": 2}", 1, "fc_2"),
    ],
    "by id against a wrong index": [
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        added(1, "function_call", "fc_2", call_id="b", name="g"),
        delta("function_call_arguments", '{"y": 2}', 0, "fc_2"),
        delta("function_call_arguments", '{"x": 1}', 1, "fc_1"),
    ],
    "by index where ids change with every event": [
        added(0, "function_call", "z1", call_id="a", name="f"),
        delta("function_call_arguments", '{"x"', 0, "z2"),
        delta("function_call_arguments", ": 1}", 0, "z3"),
        added(1, "function_call", "z4", call_id="b", name="g"),
        delta("function_call_arguments", '{"y": 2}', 1, "z5"),
        finished(0, "function_call", "z6", call_id="a", name="f", arguments='{"x": 1}'),
        finished(1, "function_call", "z7", call_id="b", name="g", arguments='{"y": 2}'),
    ],
    "to the newest without either": [
        added(None, "function_call", "", call_id="a", name="f"),
        delta("function_call_arguments", '{"x": 1}', None),
        added(None, "function_call", "", call_id="b", name="g"),
        delta("function_call_arguments", '{"y": 2}', None),
    ],
    "one index for all": [
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        delta("function_call_arguments", '{"x": 1}', 0, "fc_1"),
        added(0, "function_call", "fc_2", call_id="b", name="g"),
        delta("function_call_arguments", '{"y": 2}', 0, "fc_2"),
    ],
    "whole arguments only": [
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        {
            "type": "response.function_call_arguments.done",
            "item_id": "fc_1",
            "output_index": 0,
            "arguments": '{"x": 1}',
        },
        finished(1, "function_call", "fc_2", call_id="b", name="g", arguments='{"y": 2}'),
    ],
    "fragments that were lost": [
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        delta("function_call_arguments", '{"x"', 0, "fc_1"),
        finished(0, "function_call", "fc_1", call_id="a", name="f", arguments='{"x": 1}'),
        added(1, "function_call", "fc_2", call_id="b", name="g", arguments='{"y": 2}'),
    ],
    "opened twice": [
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        delta("function_call_arguments", '{"x": 1}', 0, "fc_1"),
        added(0, "function_call", "fc_1", call_id="a", name="f"),
        added(1, "function_call", "fc_2", call_id="b", name="g"),
        delta("function_call_arguments", '{"y": 2}', 1, "fc_2"),
    ],
    "head that comes late": [
        delta("function_call_arguments", '{"x": 1}', 0, "fc_1"),
        finished(0, "function_call", "fc_1", call_id="a", name="f", arguments='{"x": 1}'),
        delta("function_call_arguments", '{"y": 2}', 1, "fc_2"),
        finished(1, "function_call", "fc_2", call_id="b", name="g", arguments='{"y": 2}'),
    ],
    "only at the end": [
        over(
            output=[
                {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
                {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "g", "arguments": '{"y": 2}'},
            ]
        )
    ],
}


@pytest.mark.parametrize("case", ROUTES)
async def test_fragments_find_their_call(case: str) -> None:
    """However vendors name items, two calls come out, each with its own arguments and the id of the call."""
    outcome = await played(*ROUTES[case], over())
    assert outcome.calls == [("a", "f", '{"x": 1}'), ("b", "g", '{"y": 2}')]


TEXTS = {
    "deltas": [delta("output_text", "Hel"), delta("output_text", "lo")],
    "and the whole text": [
        delta("output_text", "Hello", content_index=0),
        {"type": "response.output_text.done", "output_index": 0, "content_index": 0, "text": "Hello"},
        finished(0, "message", "m", content=[{"type": "output_text", "text": "Hello"}]),
    ],
    "only the whole text": [{"type": "response.output_text.done", "output_index": 0, "text": "Hello"}],
    "only the whole item": [finished(0, "message", "m", content=[{"type": "output_text", "text": "Hello"}])],
    "a tail that was lost": [
        delta("output_text", "Hel", content_index=0),
        {"type": "response.output_text.done", "output_index": 0, "content_index": 0, "text": "Hello"},
    ],
    "parts counted otherwise": [
        delta("output_text", "Hello", content_index=1),
        finished(0, "message", "m", content=[{"type": "output_text", "text": "Hello"}]),
    ],
    "halves of a character": [
        delta("output_text", "Hello"),
        '{"type":"response.output_text.delta","output_index":0,"delta":" \\ud83d"}',
        '{"type":"response.output_text.delta","output_index":0,"delta":"\\ude00"}',
    ],
    "half a character": ['{"type":"response.output_text.delta","output_index":0,"delta":"Hello \\ud83d"}'],
}


@pytest.mark.parametrize("case", TEXTS)
async def test_text_is_there_once(case: str) -> None:
    """Whole texts add what is missing and repeat nothing; half a character is a mark, two halves are one."""
    outcome = await played(*TEXTS[case], over())
    expected = {"halves of a character": "Hello 😀", "half a character": "Hello �"}.get(case, "Hello")
    assert outcome.text == expected
    assert [part.text for part in parts_of(outcome)] == [expected]
    assert outcome.response.finish_reason == "stop"


async def test_raw_reasoning_is_told_from_summaries() -> None:
    """It goes back as content where it may; without a sealed form and without text there is no block at all."""
    outcome = await played(
        added(0, "reasoning", "r1", summary=[]),
        delta("reasoning_text", "hm", 0, "r1", content_index=0),
        finished(0, "reasoning", "r1", summary=[], content=[{"type": "reasoning_text", "text": "hm"}]),
        added(1, "reasoning", "r2", summary=[]),
        delta("output_text", "A", 2),
        over(),
    )
    assert (outcome.reasoning, outcome.text) == ("hm", "A")
    first, second = parts_of(outcome)
    assert signature_for("responses", first.reasoning) == "content"
    assert second.text == "A"


async def test_a_refusal_is_text_and_told_by_the_finish_reason() -> None:
    """Streamed or only in the item."""
    for events in (
        [delta("refusal", "No."), {"type": "response.refusal.done", "output_index": 0, "refusal": "No."}],
        [finished(0, "message", "m", content=[{"type": "refusal", "refusal": "No."}])],
    ):
        outcome = await played(*events, over())
        assert (outcome.text, outcome.response.finish_reason) == ("No.", "content_filter")


async def test_unknown_events_and_items_are_skipped(vendor) -> None:
    """The vendor's own tools, annotations, keepalives, whatever comes next."""
    outcome = await played(
        {"type": "keepalive"},
        ": ping",
        added(0, "web_search_call", "ws_1"),
        {"type": "response.web_search_call.searching", "output_index": 0, "item_id": "ws_1"},
        finished(0, "web_search_call", "ws_1", action={"type": "search"}),
        {"type": "response.output_text.annotation.added", "output_index": 1, "annotation": {}},
        {"type": "response.something.new", "delta": "x", "text": ["y"], "item": "z", "response": [1]},
        delta("output_text", "A", 1),
        delta("output_text", None, 1),
        over(),
        done=True,
    )
    assert outcome.text == "A"
    assert outcome.response.finish_reason == "stop"


async def test_ids_used_before_are_made_anew(kit, vendor) -> None:
    """Ids of calls are unique over the conversation."""
    script = kit.streams(*called(0, "fc_1", "a"), *called(1, "fc_2", "a"), over(), done=False)
    async with vendor(script) as served, kit.api_at(served, ResponsesApi()) as model:
        first = await kit.play(model)
        second = await kit.play(model, ModelRequest([first.response.message]))
    ids = [call[0] for call in first.calls + second.calls]
    assert len(set(ids)) == 4
    assert ids[0] == "a"


ODD = (None, 0, 1.5, True, "x", [], ["x"], [None], {}, {"type": "message", "content": [1, {"text": 2}]})


def test_fields_of_any_type_never_crash() -> None:
    """Whatever stands where text or an object is expected, the answer goes on or fails as a model's failure."""
    rng = random.Random(SEED)
    base = [
        added(0, "reasoning", "rs_1", summary=[{"text": "S"}], content=[], encrypted_content="E"),
        delta("reasoning_summary_text", "S", 0, "rs_1", summary_index=0),
        finished(0, "message", "m", content=[{"type": "output_text", "text": "A"}]),
        *called(1, "fc_1", "a"),
        finished(1, "function_call", "fc_1", call_id="a", name="f", arguments="{}"),
        over(usage={"input_tokens": 1, "output_tokens_details": {}}, output=[], incomplete_details={"reason": "x"}),
    ]
    for _ in range(3000):
        fold = ResponsesApi().answer(Redactor([]), frozenset(), "")
        events = copy.deepcopy(base)
        for _ in range(rng.choice((1, 2, 4))):
            event = rng.choice([event for event in events if event])
            inner = [value for value in event.values() if isinstance(value, dict) and value]
            target = rng.choice([event, *inner])
            target[rng.choice([*target])] = copy.deepcopy(rng.choice(ODD))
        try:
            for event in events:
                fold.feed(ServerEvent(json.dumps(event)))
            fold.end()
            fold.response()
        except ModelError:
            continue
