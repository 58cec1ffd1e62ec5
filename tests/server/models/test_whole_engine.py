"""An agent over a router over vendors of three APIs that misbehave at random, in a real runner on SQLite."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from dualclaw import RetryMode, Role, RunOptions
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.models.breaker import BreakerPolicy
from dualclaw_server.models.endpoint import ModelTimeouts
from dualclaw_server.models.router import RouterModel
from dualclaw_server.models.vendors import shipped_vendors
from dualclaw_server.stores.sqlite import SqliteStore
from tests.server.engine.conftest import at_work_with, calls, echo, results, texts

RUNS = 24
SEED = 20_261_019
WORDS = [f"w{number} " for number in range(9)]
NAMES = ("custom", "openai-responses", "anthropic")
BAD = ("EOF", "reset", "error", "garbage", "429", "503", "page", "silence", "another text", "no end")


def events_of(name: str, words: list[str], call: bool) -> tuple[list[object], list[object]]:
    """Return the events that say the words (and call the tool), and those that end the answer."""
    arguments = '{"text": "x"}'
    if name == "custom":
        said: list[object] = [{"choices": [{"delta": {"content": word}}]} for word in words]
        function = {"name": "echo", "arguments": arguments}
        if call:
            said.append({"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": function}]}}]})
        return said, [{"choices": [{"delta": {}, "finish_reason": "tool_calls" if call else "stop"}]}, "[DONE]"]
    if name == "openai-responses":
        where = {"item_id": "m", "output_index": 0, "content_index": 0}
        said = [{"type": "response.output_text.delta", "delta": word, **where} for word in words]
        item = {"type": "function_call", "id": "f", "call_id": "c", "name": "echo", "arguments": arguments}
        if call:
            said.append({"type": "response.output_item.done", "output_index": 1, "item": item})
        return said, [{"type": "response.completed", "response": {"id": "r", "status": "completed"}}]
    said = [{"type": "message_start", "message": {"id": "m"}}]
    text = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words
    ]
    said += [text, *deltas, {"type": "content_block_stop", "index": 0}]
    block = {"type": "tool_use", "id": "c", "name": "echo", "input": json.loads(arguments)}
    if call:
        said.append({"type": "content_block_start", "index": 1, "content_block": block})
        said.append({"type": "content_block_stop", "index": 1})
    stop = {"type": "message_delta", "delta": {"stop_reason": "tool_use" if call else "end_turn"}}
    return said, [stop, {"type": "message_stop"}]


def misbehaving(kit, name: str, random_source: random.Random):
    """Return a vendor's script: right one time in three, else wrong in some way, at some word."""

    async def script(connection, asked) -> None:
        call = "<x>" not in asked.body.decode()  # the tool has not answered yet
        how = random_source.choice(BAD) if random_source.random() < 0.67 else ""
        words = [word.upper() for word in WORDS] if how == "another text" else WORDS
        said, end = events_of(name, words, call)
        cut = random_source.randrange(1, len(said))
        if how in ("429", "503"):
            await kit.answers(int(how), b'{"error":{"message":"later"}}')(connection, asked)
            return
        if how == "page":
            await kit.answers(200, b"<html>hello", "text/html")(connection, asked)
            return
        await connection.send(kit.SSE_HEAD)
        for event in said[: cut if how not in ("", "no end", "another text") else len(said)]:
            await connection.send(kit.event_bytes(event, done=False))
            await asyncio.sleep(0)
        match how:
            case "reset":
                connection.writer.transport.abort()
            case "error":
                error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
                await connection.send(kit.event_bytes(error, done=False))
            case "garbage":
                await connection.send(b"data: <oops>\n\n")
            case "silence":
                await connection.closed_by_peer()
            case "" | "another text":
                await connection.send(kit.event_bytes(*end, done=False))

    return script


@pytest.mark.parametrize("mode", ["LIVE", "HOLD", "CONTINUE"])
async def test_what_clients_see_is_right_whatever_the_vendors_do(kit, vendor, tmp_path: Path, mode: str) -> None:
    """Every run ends in a typed way, follows the rules of a stream, and shows no word twice, nor two answers mixed."""
    random_source = random.Random(SEED)
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    timeouts = ModelTimeouts(first_token=10, idle=2, stalled=4, after_finish=2)
    retry = RetryPolicy(attempts=3, first_delay=0.01, max_delay=0.02)
    async with (
        vendor(misbehaving(kit, NAMES[0], random_source)) as first,
        vendor(misbehaving(kit, NAMES[1], random_source)) as second,
        vendor(misbehaving(kit, NAMES[2], random_source)) as third,
    ):
        models = [
            shipped_vendors()[name].make_model("m", base_url=served.url, key="k", timeouts=timeouts)
            for name, served in zip(NAMES, (first, second, third), strict=True)
        ]
        router = RouterModel(models, labels=NAMES, breaker=BreakerPolicy(failures=50, rate=1.0, least_calls=500))
        agent = Agent(name="test", models=[router], tools=[echo], retry=retry)
        options = RunOptions(retry_mode=RetryMode.Value(f"RETRY_MODE_{mode}"))
        try:
            async with at_work_with(store, [agent]) as engine:
                runs = await asyncio.gather(*(engine.ask("hi", options=options) for _ in range(RUNS)))
                histories = [await engine.messages(run.conversation_id) for run in runs]
        finally:
            await router.aclose()
            await store.close()
    lower = "".join(WORDS)
    answers = {f"{first}\n\n{second}" for first in (lower, lower.upper()) for second in (lower, lower.upper())}
    ended = {"done": 0, "error": 0}
    for run, history in zip(runs, histories, strict=True):
        kind = run.last.WhichOneof("payload")
        ended[kind or ""] += 1
        if kind == "done":
            assert run.view.text == run.last.done.content
            assert run.view.text in answers
            said = [texts(message) for message in history if message.role == Role.ROLE_ASSISTANT]
            assert "\n\n".join(said) == run.view.text
            assert {*results(history)} == {*calls(history)}
        else:
            assert run.last.error.diagnosis.code.startswith("model."), run.last.error
    assert ended["done"] > RUNS / 4, ended
