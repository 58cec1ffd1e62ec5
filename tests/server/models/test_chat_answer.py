"""What is kept of Chat Completions answers beside their text: signatures, refusals, the cost of failed calls."""

import copy
import json
import random
from collections.abc import Iterator

import pytest

from dualclaw_server.engine.model import ModelError
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import signature_for
from dualclaw_server.models.sse import ServerEvent


async def outcome_of(kit, vendor, script):
    """Play one stream against a script."""
    async with vendor(script) as served, kit.model_at(served) as model:
        return await kit.play(model)


async def test_ps38_signatures_and_sealed_blocks_are_kept_in_order(kit, vendor) -> None:
    """A signature belongs to the block before it, also to one without text; sealed data is a block of its own."""
    script = kit.streams(
        kit.chunk(reasoning="R", reasoning_details=[{"type": "reasoning.text", "text": "R"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "signature": "S"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.encrypted", "data": "SEAL", "id": "r1"}]),
        kit.chunk("A"),
        kit.chunk(finish="stop"),
    )
    outcome = await outcome_of(kit, vendor, script)
    found = [part.reasoning for part in outcome.response.message.parts if part.WhichOneof("part") == "reasoning"]
    assert [(part.text, part.redacted, part.id) for part in found] == [("R", b"", ""), ("", b"SEAL", "r1")]
    told = [json.loads(signature_for("chat", part) or "") for part in found]
    assert told == [
        {"type": "reasoning.text", "signature": "S"},
        {"type": "reasoning.encrypted", "id": "r1"},
    ]


async def test_details_are_told_apart_by_their_index(kit, vendor) -> None:
    """Blocks of reasoning that come in turn stay apart; a late signature finds its own; an empty one is no block."""
    script = kit.streams(
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "index": 0, "text": "a", "format": "f"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "index": 0, "text": "b", "signature": ""}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "index": 1, "text": "c"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.summary", "index": 2, "summary": ""}]),
        kit.chunk("A"),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "index": 0, "signature": "S0"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "index": 1, "signature": "S1"}]),
        kit.chunk(finish="stop"),
    )
    outcome = await outcome_of(kit, vendor, script)
    found = [part.reasoning for part in outcome.response.message.parts if part.WhichOneof("part") == "reasoning"]
    assert outcome.reasoning == "abc"
    assert [(part.text, json.loads(signature_for("chat", part) or "")) for part in found] == [
        ("ab", {"type": "reasoning.text", "index": 0, "format": "f", "signature": "S0"}),
        ("c", {"type": "reasoning.text", "index": 1, "signature": "S1"}),
    ]


async def test_a_signature_ends_its_block(kit, vendor) -> None:
    """It may come in pieces; text that comes after it is another block, though no index tells so."""
    script = kit.streams(
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "text": "a", "signature": "S"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "signature": "T"}]),
        kit.chunk(reasoning_details=[{"type": "reasoning.text", "text": "b"}]),
        kit.chunk(finish="stop"),
    )
    outcome = await outcome_of(kit, vendor, script)
    found = [part.reasoning for part in outcome.response.message.parts]
    assert [(part.text, json.loads(signature_for("chat", part) or "")) for part in found] == [
        ("a", {"type": "reasoning.text", "signature": "ST"}),
        ("b", {"type": "reasoning.text"}),
    ]


async def test_signatures_of_calls_are_kept(kit, vendor) -> None:
    """Gemini signs calls, in the first fragment or a later one; each signature stays with its call."""
    one = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    two = {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}
    signed = {"google": {"thought_signature": "S"}}
    script = kit.streams(
        kit.call_chunk(one),
        kit.call_chunk({**two, "extra_content": signed}),
        kit.chunk(finish="tool_calls"),
    )
    outcome = await outcome_of(kit, vendor, script)
    calls = [part.tool_call for part in outcome.response.message.parts]
    assert [(call.id, signature_for("chat", call)) for call in calls] == [("a", None), ("b", "S")]


async def test_a_refusal_is_text_and_told_by_the_finish_reason(kit, vendor) -> None:
    """What the model says to refuse is shown, and nobody takes it for an answer."""
    script = kit.streams(kit.chunk(refusal="I can"), kit.chunk(refusal="not."), kit.chunk(finish="stop"))
    outcome = await outcome_of(kit, vendor, script)
    assert (outcome.text, outcome.response.finish_reason) == ("I cannot.", "content_filter")


COSTLY = {
    "beside the error": [{"usage": {"prompt_tokens": 9}, "error": {"message": "gone", "code": 502}}],
    "before the break": [{"choices": [], "usage": {"prompt_tokens": 9}}],
    "in the choice": [{"choices": [{"index": 0, "delta": {"content": "b"}, "usage": {"prompt_tokens": 9}}]}],
}


@pytest.mark.parametrize("case", COSTLY)
async def test_a_failed_call_says_what_it_has_cost(kit, vendor, case: str) -> None:
    """Tokens reported before or with a failure are in the error."""
    async with vendor(kit.streams(kit.chunk("a"), *COSTLY[case], done=False)) as served, kit.model_at(served) as model:
        outcome = await kit.play(model)
    assert outcome.error is not None
    assert outcome.error.usage is not None
    assert outcome.error.usage.input_tokens == 9


async def test_a_failed_call_without_report_says_nothing_of_its_cost(kit, vendor) -> None:
    """No report is no usage, rather than none used."""
    async with vendor(kit.streams(kit.chunk("a"), done=False)) as served, kit.model_at(served) as model:
        outcome = await kit.play(model)
    assert outcome.error is not None
    assert outcome.error.usage is None


async def test_a_filter_that_refuses_the_prompt_is_named(kit, vendor) -> None:
    """Trying again does not help, and neither does a look at the request."""
    body = {"error": {"code": "content_filter", "message": "The response was filtered"}}
    script = kit.answers(400, json.dumps(body).encode())
    async with vendor(script) as served, kit.model_at(served) as model:
        outcome = await kit.play(model)
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", False)
    assert "content filter" in outcome.error.hint


ODD = (None, 0, 1.5, True, "x", [], ["x"], [None], {}, {"text": 2}, [{"text": 2}])


def test_fields_of_any_type_never_crash(kit) -> None:
    """Whatever stands where text or an object is expected, the answer goes on or fails as a model's failure."""
    rng = random.Random(20240229)
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"google": {}}}
    detail = {"type": "reasoning.text", "text": "R", "index": 0, "id": "r", "signature": "S", "data": ""}
    base = [
        kit.chunk(reasoning="R", reasoning_content="R", reasoning_details=[detail]),
        kit.chunk("A", refusal=None),
        kit.call_chunk(call),
        {**kit.chunk(finish="stop"), "usage": {"prompt_tokens": 1, "completion_tokens_details": {}}},
    ]
    for _ in range(3000):
        fold = ChatApi().answer(Redactor([]), frozenset(), "")
        events = copy.deepcopy(base)
        for _ in range(rng.choice((1, 2, 4))):
            target = rng.choice(list(objects(events)))
            target[rng.choice([*target])] = copy.deepcopy(rng.choice(ODD))
        try:
            for event in events:
                fold.feed(ServerEvent(json.dumps(event)))
            fold.end()
            fold.response()
        except ModelError:
            continue


def objects(value: object) -> Iterator[dict[str, object]]:
    """Yield all objects with fields in a JSON value."""
    if isinstance(value, dict) and value:
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from objects(each)
