"""One conversation that moves between the three wire APIs, against servers as strict as the real ones.

Each server refuses with a 400 what its original refuses: results without their calls and calls without their
results, ids and names it does not take, turns in a wrong order, images in a wrong form or place, and signed or
sealed reasoning that it has not given itself. Each gives reasoning with a signature, text, and two calls at once
for every question, and its answer once both results are there.
"""

import base64
import copy
import itertools
import json
import re
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from dualclaw import ContentPart, Media, Message, Role, ToolResult
from dualclaw_server.engine.model import ModelOptions, ModelRequest, ToolSpec
from dualclaw_server.models.anthropic.dialect import AnthropicDialect
from dualclaw_server.models.anthropic.model import AnthropicModel
from dualclaw_server.models.chat.dialect import ChatDialect
from dualclaw_server.models.chat.model import OpenAIChatModel
from dualclaw_server.models.responses.model import ResponsesModel

PNG = b"\x89PNG\r\n\x1a\nrest"
TOOLS = [ToolSpec("look", "looks", '{"type":"object","properties":{"at":{"type":"string"}}}'), ToolSpec("wait", "", "")]
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
TLS = ssl.create_default_context()


class RefusedError(Exception):
    """What a strict vendor says to a request it does not take."""


def demand(what: object, why: str) -> None:
    if not what:
        raise RefusedError(why)


def sse(*events: dict[str, object]) -> bytes:
    return b"".join(f"event: {event.get('type', '')}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def is_png_address(address: str) -> bool:
    head, _, data = address.partition(",")
    return head == "data:image/png;base64" and base64.b64decode(data, validate=True) == PNG


@dataclass(slots=True)
class Chat:
    """Chat Completions with signed reasoning; call ids count from 0 in every answer, as some vendors' do."""

    given: set[str] = field(default_factory=set)

    def check(self, body: dict, headers: dict[str, str]) -> bool:
        """Refuse the request, or return whether results have just come."""
        demand(headers.get("authorization") == "Bearer key", "no key")
        waiting: set[str] = set()
        for place, message in enumerate(body["messages"]):
            role = message["role"]
            demand(role in ("system", "user", "assistant", "tool"), "unknown role")
            demand(role != "system" or place == 0, "system text is not first")
            if role == "tool":
                demand(message["tool_call_id"] in waiting, "tool result without a preceding call")
                demand(isinstance(message["content"], str), "a result is text")
                waiting.discard(message["tool_call_id"])
                continue
            demand(not waiting, f"no results for {waiting}")
            if role == "user" and not isinstance(message["content"], str):
                for part in message["content"]:
                    demand(part["type"] in ("text", "image_url"), "unknown part")
                    demand(part["type"] == "text" or is_png_address(part["image_url"]["url"]), "no image")
            if role == "assistant":
                demand(message.keys() <= {"role", "content", "tool_calls", "reasoning_details"}, "unknown field")
                demand(message["content"] or message.get("tool_calls"), "empty message")
                for detail in message.get("reasoning_details", []):
                    demand(detail["signature"] in self.given, "unknown signature")
                for call in message.get("tool_calls", []):
                    demand(NAME.fullmatch(call["function"]["name"]), "bad name")
                    demand(isinstance(json.loads(call["function"]["arguments"]), dict), "arguments are no object")
                    demand(0 < len(call["id"]) <= 40 and call["id"] not in waiting, "bad id")
                    waiting.add(call["id"])
        demand(not waiting, f"no results for {waiting}")
        return body["messages"][-1]["role"] == "tool"

    def answer(self, *, came: bool) -> bytes:
        signature = f"chat-{len(self.given)}"
        self.given.add(signature)
        details = [{"type": "reasoning.text", "text": "I think", "signature": signature, "index": 0}]
        calls = [
            {"index": n, "id": f"call_{n}", "function": {"name": TOOLS[n].name, "arguments": '{"at": "x"}'}}
            for n in range(2)
        ]
        last: dict[str, object] = {"content": "Seen."} if came else {"content": "I look.", "tool_calls": calls}
        deltas = [{"reasoning_details": details}, last]
        chunks = [{"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop" if came else "tool_calls"}]}
        return sse(*chunks, end) + b"data: [DONE]\n\n"

    def own_reasoning(self, body: dict) -> list[str]:
        return [part["signature"] for message in body["messages"] for part in message.get("reasoning_details", [])]


@dataclass(slots=True)
class Responses:
    """The Responses API with sealed reasoning; nothing is stored."""

    given: set[str] = field(default_factory=set)
    calls: int = 0

    def check(self, body: dict, headers: dict[str, str]) -> bool:
        """Refuse the request, or return whether results have just come."""
        demand(headers.get("authorization") == "Bearer key", "no key")
        demand(body["store"] is False, "stored")
        called: list[str] = []
        answered: list[str] = []
        items = body["input"]
        for place, item in enumerate(items):
            match item.get("type", "message"):
                case "message":
                    demand(item["role"] in ("user", "assistant", "system", "developer"), "unknown role")
                    self._content(item)
                case "function_call":
                    demand(NAME.fullmatch(item["name"]), "bad name")
                    demand(isinstance(json.loads(item["arguments"]), dict), "arguments are no object")
                    demand(0 < len(item["call_id"]) <= 64 and item["call_id"] not in called, "bad id")
                    demand("id" not in item, "an id of an item that is not stored")
                    called.append(item["call_id"])
                case "function_call_output":
                    demand(item["call_id"] in called, "no tool call found for function call output")
                    answered.append(item["call_id"])
                case "reasoning":
                    demand(item["encrypted_content"] in self.given, "sealed content could not be verified")
                    demand(item["id"].startswith("rs_"), "bad reasoning id")
                    after = items[place + 1] if place + 1 < len(items) else {}
                    led = after.get("type") in ("function_call", "reasoning") or after.get("role") == "assistant"
                    demand(led, "reasoning without its following item")
                case _:
                    demand(False, "unknown item")
        demand(sorted(called) == sorted(answered), "no tool output found for function call")
        return items[-1].get("type") == "function_call_output"

    def _content(self, item: dict) -> None:
        if isinstance(item["content"], str):
            demand(item["content"].strip(), "empty message")
            return
        kinds = ("input_text", "input_image") if item["role"] == "user" else ("output_text",)
        for part in item["content"]:
            demand(part["type"] in kinds, "a part of a wrong kind")
            demand(part["type"] != "input_image" or is_png_address(part["image_url"]), "no image")

    def answer(self, *, came: bool) -> bytes:
        sealed = f"sealed-{len(self.given)}"
        self.given.add(sealed)
        items: list[dict[str, object]] = [
            {
                "id": f"rs_{sealed}",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "I think"}],
                "encrypted_content": sealed,
            }
        ]
        said = [{"type": "output_text", "text": "Seen." if came else "I look."}]
        items.append({"id": "msg_1", "type": "message", "role": "assistant", "content": said})
        for spec in [] if came else TOOLS:
            self.calls += 1
            call = {"type": "function_call", "call_id": f"call_r{self.calls}", "name": spec.name}
            items.append({"id": f"fc_{self.calls}", **call, "arguments": '{"at":"x"}'})
        done = [
            {"type": "response.output_item.done", "output_index": place, "item": item}
            for place, item in enumerate(items)
        ]
        end = {"type": "response.completed", "response": {"id": "resp_1", "model": "m", "status": "completed"}}
        return sse(*done, end)

    def own_reasoning(self, body: dict) -> list[str]:
        return [item["encrypted_content"] for item in body["input"] if item.get("type") == "reasoning"]


@dataclass(slots=True)
class Anthropic:
    """The Messages API with a budget for thinking; it gives a signed and a sealed block each time."""

    given: set[str] = field(default_factory=set)
    calls: int = 0

    def check(self, body: dict, headers: dict[str, str]) -> bool:
        """Refuse the request, or return whether results have just come."""
        demand(headers.get("x-api-key") == "key" and headers.get("anthropic-version"), "no key or version")
        demand(body["max_tokens"] > 0, "no max_tokens")
        messages = body["messages"]
        demand(messages[0]["role"] == messages[-1]["role"] == "user", "it begins and ends with the user")
        waiting: list[str] = []
        seen: set[str] = set()
        for before, message in itertools.pairwise([{"role": ""}, *messages]):
            content = message["content"]
            demand(message["role"] in ("user", "assistant"), "unknown role")
            demand(message["role"] != before["role"], "roles do not alternate")
            demand(content, "empty message")
            results = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
            demand(sorted(results) == sorted(waiting), "results and calls of the message before do not match")
            demand(all(block["type"] == "tool_result" for block in content[: len(results)]), "results are not first")
            waiting = []
            for block in content:
                self._block(block, message["role"])
                if block["type"] == "tool_use":
                    demand(block["id"] not in seen, "tool_use ids must be unique")
                    seen.add(block["id"])
                    waiting.append(block["id"])
            demand(message["role"] == "user" or "thinking" not in content[-1]["type"], "it ends with thinking")
        demand(not waiting, "no results at the end")
        demand(not seen or body.get("tools"), "tools must be defined")
        came = any(block["type"] == "tool_result" for block in messages[-1]["content"])
        if came and "thinking" in body:
            demand("thinking" in messages[-2]["content"][0]["type"], "expected thinking before tool_use")
        return came

    def _block(self, block: dict, role: str) -> None:
        match block["type"]:
            case "text":
                demand(block["text"].strip(), "blank text")
            case "image":
                demand(role == "user", "an image of the assistant")
                source = block["source"]
                demand(source["type"] == "base64" and source["media_type"] == "image/png", "no image")
                demand(base64.b64decode(source["data"], validate=True) == PNG, "no image")
            case "tool_result":
                for inner in block.get("content", []):
                    self._block(inner, role)
            case "tool_use":
                demand(role == "assistant" and isinstance(block["input"], dict), "bad call")
                demand(re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]), "bad id")
                demand(NAME.fullmatch(block["name"]), "bad name")
            case "thinking":
                demand(block.keys() == {"type", "thinking", "signature"}, "bad thinking")
                demand(f"{block['thinking']} {block['signature']}" in self.given, "invalid signature")
            case "redacted_thinking":
                demand(block["data"] in self.given, "invalid data")
            case _:
                demand(False, "unknown block")

    def answer(self, *, came: bool) -> bytes:
        number = len(self.given)
        signature, sealed = f"S{number}", f"R{number}"
        self.given |= {f"I think {signature}", sealed}
        blocks: list[tuple[dict[str, object], list[dict[str, object]]]] = [
            (
                {"type": "thinking", "thinking": "", "signature": ""},
                [
                    {"type": "thinking_delta", "thinking": "I think"},
                    {"type": "signature_delta", "signature": signature},
                ],
            ),
            ({"type": "redacted_thinking", "data": sealed}, []),
            ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "Seen." if came else "I look."}]),
        ]
        for spec in [] if came else TOOLS:
            self.calls += 1
            use = {"type": "tool_use", "id": f"toolu_{self.calls}", "name": spec.name, "input": {}}
            blocks.append((use, [{"type": "input_json_delta", "partial_json": '{"at":"x"}'}]))
        events: list[dict[str, object]] = [{"type": "message_start", "message": {"id": "msg_1", "model": "m"}}]
        for index, (start, deltas) in enumerate(blocks):
            events.append({"type": "content_block_start", "index": index, "content_block": start})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        reason = {"stop_reason": "end_turn" if came else "tool_use"}
        return sse(*events, {"type": "message_delta", "delta": reason}, {"type": "message_stop"})

    def own_reasoning(self, body: dict) -> list[str]:
        blocks = [block for message in body["messages"] for block in message["content"]]
        return [block.get("signature") or block.get("data") for block in blocks if "thinking" in block["type"]]


VENDORS = {"chat": Chat, "responses": Responses, "anthropic": Anthropic}


def model_at(name: str, url: str):
    match name:
        case "chat":
            dialect = ChatDialect(reasoning_back="details", longest_call_id=40)
            return OpenAIChatModel("m", url, "key", dialect=dialect, tls=TLS)
        case "responses":
            return ResponsesModel("m", url, "key", tls=TLS)
    thinking = AnthropicDialect(thinking='{"type":"enabled","budget_tokens":1024}')
    return AnthropicModel("m", url, "key", dialect=thinking, tls=TLS)


@pytest.fixture
def talk(kit, vendor):
    """Return what holds a conversation whose turns run on these APIs; gives it, and each vendor with its requests."""

    def script_of(strict):
        async def script(connection, asked) -> None:
            try:
                body = strict.answer(came=strict.check(asked.json, asked.headers))
                await connection.send(kit.SSE_HEAD + body)
            except (RefusedError, LookupError, ValueError) as refused:
                error = json.dumps({"error": {"type": "invalid_request_error", "message": repr(refused)}}).encode()
                await kit.answers(400, error)(connection, asked)

        return script

    async def hold(order, *, moves_inside: bool = False):
        strict = {name: VENDORS[name]() for name in VENDORS}
        conversation: list[Message] = []
        async with AsyncExitStack() as stack:
            served = {name: await stack.enter_async_context(vendor(script_of(strict[name]))) for name in VENDORS}
            models = {}
            for name, server in served.items():
                models[name] = model_at(name, server.url).with_tools(TOOLS)
                stack.push_async_callback(models[name].aclose)
            for turn, name in enumerate(order):
                image = ContentPart(image=Media(media_type="image/png", data=PNG))
                said = [ContentPart(text=f"question {turn}"), image]
                conversation.append(Message(role=Role.ROLE_USER, parts=said))
                await ask(kit, models[name], conversation)
                results = [
                    ToolResult(call_id=part.tool_call.id, parts=[ContentPart(text="here"), image])
                    for part in conversation[-1].parts
                    if part.WhichOneof("part") == "tool_call"
                ]
                assert len(results) == 2
                conversation += [
                    Message(role=Role.ROLE_TOOL, parts=[ContentPart(tool_result=result)])
                    for result in reversed(results)
                ]
                second = order[(turn + 1) % len(order)] if moves_inside else name
                await ask(kit, models[second], conversation)
        return conversation, {name: (strict[name], served[name].asked) for name in VENDORS}

    return hold


async def ask(kit, model, conversation) -> None:
    """Ask the model, and take its answer into the conversation."""
    request = ModelRequest(list(conversation), "Be brief.", ModelOptions(max_output_tokens=500))
    outcome = await kit.play(model, request)
    assert outcome.error is None, outcome.error
    assert outcome.reasoning == "I think"
    conversation.append(outcome.response.message)


@pytest.mark.parametrize("order", list(itertools.permutations(VENDORS)), ids="-".join)
async def test_a_conversation_moves_over_the_three_apis(talk, order) -> None:
    """Every order of the three is accepted by all; the first, asked again, gets all of its own reasoning back."""
    conversation, vendors = await talk([*order, order[0]])
    assert [message.parts[-1].text for message in conversation[4::5]] == ["Seen."] * 4
    ids = [part.tool_call.id for message in conversation for part in message.parts if part.HasField("tool_call")]
    assert len(set(ids)) == len(ids) == 8
    strict, asked = vendors[order[0]]
    own = strict.own_reasoning(asked[-1].json)
    # Of its first turn two answers, of its second one: each with one piece of reasoning, of Anthropic's two.
    assert len(own) == (6 if order[0] == "anthropic" else 3)
    for name in order[1:]:
        strict, asked = vendors[name]
        assert len(strict.own_reasoning(asked[-1].json)) == (2 if name == "anthropic" else 1)


@pytest.mark.parametrize("order", list(itertools.permutations(VENDORS)), ids="-".join)
async def test_a_conversation_moves_in_the_middle_of_its_calls(talk, order) -> None:
    """The results of one API's calls can be given to another API, as a fallback does."""
    conversation, _ = await talk(order, moves_inside=True)
    assert [message.parts[-1].text for message in conversation[4::5]] == ["Seen."] * 3


def _chat_call(body):
    return next(message for message in body["messages"] if message.get("tool_calls"))


def _blocks(body, kind):
    return [block for message in body["messages"] for block in message["content"] if block["type"] == kind]


def _drop(items, wanted) -> None:
    items.remove(next(item for item in items if wanted(item)))


BREAKS = {
    "chat": {
        "orphan result": lambda body: _chat_call(body).update(tool_calls=[], content="x"),
        "missing result": lambda body: _drop(body["messages"], lambda message: message["role"] == "tool"),
        "unknown signature": lambda body: _chat_call(body)["reasoning_details"][0].update(signature="sealed-0"),
        "wrong role": lambda body: body["messages"][1].update(role="model"),
        "bad id": lambda body: _chat_call(body)["tool_calls"][0].update(id="x" * 41),
    },
    "responses": {
        "orphan result": lambda body: _drop(body["input"], lambda item: item.get("type") == "function_call"),
        "missing result": lambda body: _drop(body["input"], lambda item: item.get("type") == "function_call_output"),
        "unknown signature": lambda body: next(
            item for item in body["input"] if item.get("type") == "reasoning"
        ).update(encrypted_content="R0"),
        "wrong role": lambda body: body["input"][0].update(role="tool"),
        "bad id": lambda body: next(item for item in body["input"] if item.get("type") == "function_call").update(
            call_id="x" * 65
        ),
    },
    "anthropic": {
        "orphan result": lambda body: _blocks(body, "tool_result")[0].update(tool_use_id="ghost"),
        "missing result": lambda body: body["messages"][2]["content"].pop(0),
        "unknown signature": lambda body: _blocks(body, "thinking")[0].update(signature="chat-0"),
        "wrong role": lambda body: body["messages"][1].update(role="user"),
        "bad id": lambda body: _blocks(body, "tool_use")[0].update(id="functions.look:0"),
    },
}


def refuses(strict, body, headers) -> bool:
    try:
        strict.check(body, headers)
    except (RefusedError, LookupError):
        return True
    return False


@pytest.mark.parametrize("name", BREAKS)
async def test_the_servers_of_this_test_refuse_what_the_real_ones_refuse(talk, name: str) -> None:
    """Each fault, put into a request that was accepted, is refused: the servers are strict."""
    _, vendors = await talk(["chat", "responses", "anthropic"])
    strict, asked = vendors[name]
    headers = asked[-1].headers
    assert not refuses(strict, asked[-1].json, headers)
    for fault, spoil in BREAKS[name].items():
        body = copy.deepcopy(asked[-1].json)
        spoil(body)
        assert refuses(strict, body, headers), fault
