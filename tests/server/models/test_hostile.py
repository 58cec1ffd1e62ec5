"""Answers that mean harm or nonsense: a fold gives an answer that is right, or a typed error, and in time."""

import json
import random
import time
from collections.abc import Iterator

import pytest

from dualclaw_server.engine.model import ModelError, ModelResponse
from dualclaw_server.models.api import AnswerFold
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.reasoning import ThinkSplitter
from dualclaw_server.models.sse import ServerEvent

ROUNDS = 400
SEED = 20_261_018
LINEAR_SECONDS = 45
"""Far more than any of these takes in linear time, far less than in quadratic time; CPU, not time."""


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


ODD: list[object] = [
    *(None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 10**30, 10**4200, [], {}, [None], [[]], ["x"]),
    *("", "x", "null", "{}", "{", "[]", "\ud83c", "\udf78", "\u0000", "9" * 5000, "3", "²", "١", "A" * 300),
    *({"a": 1}, {"type": "text"}, [{"type": "text", "text": 5}], {"error": 1}, {"error": {}}, deep(300)),
    *("error", "[DONE]", "ping", "stop", "length", "tool_calls", "tool_use", "thinking", "function_call", "<think>"),
]


def chat() -> list[object]:
    fields: list[dict[str, object]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0, "signature": "S"}]},
        {"content": "<think>a</think>b"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    chunks = [{"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta}]} for delta in fields]
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}}
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": usage}]


def responses() -> list[object]:
    reasoning = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "id": "f", "call_id": "c1", "name": "f", "arguments": ""}
    message = {"type": "message", "id": "m", "content": []}
    delta = "response.function_call_arguments.delta"
    return [
        {"type": "response.created", "response": {"id": "x", "model": "m", "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": reasoning | {"summary": []}},
        {"type": "response.reasoning_summary_text.delta", "item_id": "r", "summary_index": 0, "delta": "hm"},
        {"type": "response.output_item.done", "output_index": 0, "item": reasoning | {"encrypted_content": "E"}},
        {"type": "response.output_item.added", "output_index": 1, "item": message},
        {"type": "response.output_text.delta", "item_id": "m", "output_index": 1, "content_index": 0, "delta": "hi"},
        {"type": "response.output_item.added", "output_index": 2, "item": call},
        {"type": delta, "item_id": "f", "output_index": 2, "delta": '{"a": 1}'},
        {"type": "response.output_item.done", "output_index": 2, "item": call | {"arguments": '{"a": 1}'}},
        {"type": "response.completed", "response": {"id": "x", "status": "completed", "usage": {"input_tokens": 1}}},
    ]


def anthropic() -> list[object]:
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    thinking = {"type": "thinking", "thinking": ""}
    return [
        {"type": "message_start", "message": {"id": "x", "model": "m", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "S"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": call},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]


EVENTS = {"chat": chat, "responses": responses, "anthropic": anthropic}
APIS = pytest.mark.parametrize("api", EVENTS)


def fold_of(kit, api: str) -> AnswerFold:
    return kit.APIS[api]().answer(Redactor([]), frozenset({"c2"}), "")


def changed(value: object, random_source: random.Random, rate: float) -> object:
    """Return the value with parts of it replaced, left out or sent twice."""
    if random_source.random() < rate:
        return random_source.choice(ODD)
    if isinstance(value, dict):
        kept = [item for item in value.items() if random_source.random() > rate / 2]
        return {name: changed(inner, random_source, rate) for name, inner in kept}
    if isinstance(value, list):
        made = [changed(inner, random_source, rate) for inner in value]
        return made + made[-1:] if random_source.random() < rate else made
    return value


def hostile(api: str, random_source: random.Random) -> Iterator[ServerEvent]:
    """Yield the events of an answer with something wrong: values, order, cuts, names."""
    rate = random_source.choice((0.002, 0.01, 0.05))
    events = EVENTS[api]()
    if random_source.random() < 0.2:
        random_source.shuffle(events)
    for event in events:
        data = json.dumps(changed(event, random_source, rate), ensure_ascii=random_source.random() < 0.5)
        if random_source.random() < rate:
            data = data[: random_source.randrange(len(data))]
        if random_source.random() < rate:
            data += f"\n{json.dumps(random_source.choice(ODD[:16]))}"
        name = "error" if random_source.random() < rate / 2 else ""
        yield ServerEvent(data.encode("utf-8", "replace").decode() or "x", name)


def check(response: ModelResponse, shown: str) -> None:
    """Check what the engine relies on, whatever the answer says."""
    response.message.SerializeToString()
    calls = [part.tool_call for part in response.message.parts if part.WhichOneof("part") == "tool_call"]
    ids = [call.id for call in calls]
    assert all(ids)
    assert len({*ids, "c2"}) == len(ids) + 1
    assert (response.finish_reason == "tool_calls") == bool(calls)
    for call in calls:
        assert call.name
        assert (
            (call.args_json == "")
            if call.id in response.bad_arguments
            else isinstance(json.loads(call.args_json), dict)
        )
    assert "".join(part.text for part in response.message.parts) == shown


@APIS
def test_whatever_a_stream_holds_the_outcome_is_an_answer_or_a_typed_error(kit, api: str) -> None:
    """Values of any type in any place, events shuffled, cut and repeated, with a fixed seed."""
    random_source = random.Random(SEED)
    ended = {"answer": 0, "error": 0}
    for _ in range(ROUNDS):
        fold, shown = fold_of(kit, api), ""
        try:
            for event in hostile(api, random_source):
                if fold.done:
                    break
                fold.feed(event)
                shown += "".join(chunk.text for chunk in fold.take() if type(chunk).__name__ == "TextDelta")
            fold.end()
            shown += "".join(chunk.text for chunk in fold.take() if type(chunk).__name__ == "TextDelta")
            check(fold.response(), shown)
            ended["answer"] += 1
        except ModelError:
            ended["error"] += 1
    assert min(ended.values()) > ROUNDS / 10, ended


@APIS
def test_whatever_a_body_holds_the_outcome_is_an_answer_or_a_typed_error(kit, api: str) -> None:
    """The same for JSON that should be a whole answer."""
    random_source = random.Random(SEED)
    for _ in range(ROUNDS):
        fold = fold_of(kit, api)
        try:
            fold.feed_body(json.dumps(changed(random_source.choice(EVENTS[api]()), random_source, 0.02)))
            fold.end()
            shown = "".join(chunk.text for chunk in fold.take() if type(chunk).__name__ == "TextDelta")
            check(fold.response(), shown)
        except ModelError:
            pass


@pytest.mark.parametrize("api", ["chat", "anthropic"])
def test_an_index_of_thousands_of_digits_is_no_index(kit, api: str) -> None:
    """A number too long to read is none, and not an exception of the reader."""
    index = "9" * 5000
    fold = fold_of(kit, api)
    if api == "chat":
        call = {"index": index, "id": "c1", "function": {"name": "f", "arguments": "{}"}}
        fold.feed(ServerEvent(json.dumps({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "stop"}]})))
    else:
        block = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
        fold.feed(ServerEvent(json.dumps({"type": "content_block_start", "index": index, "content_block": block})))
        fold.feed(ServerEvent(json.dumps({"type": "content_block_stop", "index": index})))
    fold.feed(ServerEvent("[DONE]"))
    fold.end()
    assert [part.tool_call.name for part in fold.response().message.parts] == ["f"]


def call_fragments(count: int, **call: object) -> Iterator[object]:
    """Yield one call whose arguments come in objects, with a name or an id in each fragment."""
    yield {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"k":['}}]}
    for number in range(count):
        function = {"arguments": '{"a":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbb"},{}', **call}
        yield (
            {"tool_calls": [{"index": 0, "function": function}]}
            if call
            else {"tool_calls": [{"index": 0, "id": f"x{number}", "function": function}]}
        )


def chat_stream(deltas: Iterator[object]) -> Iterator[object]:
    for delta in deltas:
        yield {"choices": [{"delta": delta}]}


def thinking(deltas: Iterator[object]) -> Iterator[object]:
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": 0, "delta": delta}


def sealed(number: int) -> object:
    return {"reasoning_details": [{"type": "reasoning.text", "text": "w", "id": str(number)}]}


def messages_without_ids(count: int) -> Iterator[object]:
    yield {"type": "response.output_item.added", "item": {"type": "message", "id": "m"}, "output_index": 0}
    for number in range(count):
        item = {"type": "reasoning", "id": f"i{number}"}
        yield {"type": "response.output_item.added", "item": item, "output_index": number + 1}
    for _ in range(count):
        yield {"type": "response.output_text.delta", "delta": "w", "item_id": "gone"}


LARGE = {
    "the name in every fragment of a call": ("chat", lambda: chat_stream(call_fragments(12_000, name="f"))),
    "another id in every fragment of a call": ("chat", lambda: chat_stream(call_fragments(12_000))),
    "a block of reasoning for every word": ("chat", lambda: chat_stream(map(sealed, range(12_000)))),
    "a signature in fragments": (
        "anthropic",
        lambda: thinking({"type": "signature_delta", "signature": "w" * 2_000} for _ in range(30_000)),
    ),
    "events of items that are not known": ("responses", lambda: messages_without_ids(30_000)),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_grows_takes_linear_time(kit, case: str) -> None:
    """An answer of thousands of fragments is read in seconds, wherever its fragments add up."""
    api, events = LARGE[case]
    fold = fold_of(kit, api)
    start = time.process_time()
    for event in events():
        fold.feed(ServerEvent(json.dumps(event)))
    assert time.process_time() - start < LINEAR_SECONDS


@pytest.mark.parametrize("before", ["", "<think>a"])
def test_white_space_that_is_held_takes_linear_time(before: str) -> None:
    """It may belong to a tag, so it is held; but it is not joined anew with each piece."""
    splitter = ThinkSplitter()
    start = time.process_time()
    splitter.feed(before)
    for _ in range(400_000):
        splitter.feed(" ")
    assert time.process_time() - start < LINEAR_SECONDS
    assert len("".join(splitter.feed("x"))) == 400_001


@APIS
@pytest.mark.parametrize("data", ['{"error":{"message":"%s"}}', '{"type":"error","message":"%s"}', "%s"])
def test_an_error_of_megabytes_is_judged_in_no_time(kit, api: str, data: str) -> None:
    """Its beginning says what it is; what it means is looked for there alone, and only that is told."""
    text = data % ("exceed { \\n " * 700_000)
    start = time.process_time()
    with pytest.raises(ModelError) as raised:
        fold_of(kit, api).feed(ServerEvent(text.replace("\\n", "\n") if data == "%s" else text))
    assert time.process_time() - start < LINEAR_SECONDS / 5
    assert len(raised.value.message) < 1_000
