"""The Anthropic API's side of a talk: its events, and a model that speaks to a server that sends them."""

import json
import ssl
import sys
from contextlib import asynccontextmanager

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw_server.models.anthropic.model import AnthropicModel

KEY = "sk-ant-0123456789abcdef"
_TLS = ssl.create_default_context()


@asynccontextmanager
async def model_at(vendor, dialect=None, timeouts=None):
    """Yield a model of the Anthropic API that talks to the vendor."""
    model = AnthropicModel("claude-x", vendor.url, KEY, dialect=dialect, timeouts=timeouts, tls=_TLS)
    try:
        yield model
    finally:
        await model.aclose()


def begin(identity="msg_1", **usage):
    message = {"id": identity, "type": "message", "role": "assistant", "model": "claude-x", "content": []}
    return {"type": "message_start", "message": {**message, "usage": {"input_tokens": 9, "output_tokens": 1, **usage}}}


def block(index, kind, **fields):
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **fields}}


def delta(index, kind, **fields):
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index):
    return {"type": "content_block_stop", "index": index}


def finish(reason="end_turn", **usage):
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 7, **usage}}


END = {"type": "message_stop"}


def text(index, *pieces):
    return [block(index, "text", text=""), *(delta(index, "text_delta", text=piece) for piece in pieces), stop(index)]


def call(index, identity, name, *fragments):
    fed = [delta(index, "input_json_delta", partial_json=fragment) for fragment in fragments]
    return [block(index, "tool_use", id=identity, name=name, input={}), *fed, stop(index)]


def stream(*events):
    """Return the bytes of a stream, each event named as the API names it."""
    made = b""
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        made += f"{name}data: {data}\n\n".encode()
    return made


@pytest.fixture
def outcome_of(kit, vendor):
    """Return what plays one stream of these events and gives what came out."""

    async def play(*events, **arguments):
        async with vendor(kit.says(kit.SSE_HEAD + stream(*events))) as served, model_at(served, **arguments) as model:
            return await kit.play(model)

    return play


def usage_of(usage):
    return MessageToDict(usage, preserving_proto_field_name=True)


def kinds_of(response):
    """(kind, text, signature, redacted) of each part; of calls the id instead of the text."""
    return [
        (
            part.WhichOneof("part"),
            part.text or part.reasoning.text or part.tool_call.id,
            part.reasoning.signature,
            part.reasoning.redacted,
        )
        for part in response.message.parts
    ]


@pytest.fixture(scope="session")
def claude():
    """Return this module: its functions make the events that the tests are written with."""
    return sys.modules[__name__]
