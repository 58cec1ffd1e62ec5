"""One answer from several attempts: retries, fallback and overflow, seen from the client's end of the log."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from dualclaw import Message, RetryMode, RunOptions, RunState, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor, Prompt
from dualclaw_server.engine.model import ModelError, ModelOptions
from dualclaw_server.engine.reason import BREATH, Breath
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.trace import Trace
from dualclaw_server.models.router import RouterModel
from dualclaw_server.models.scripted import ScriptedModel

from .conftest import TIMEOUT, Asked, Engine, Opener, at_work_with, echo, scripted, texts, turn, until

QUICK = RetryPolicy(attempts=3, first_delay=0.01, max_delay=0.01)
MODES = {
    "live": RetryMode.RETRY_MODE_LIVE,
    "hold": RetryMode.RETRY_MODE_HOLD,
    "continue": RetryMode.RETRY_MODE_CONTINUE,
}
BREAK: dict[str, object] = {"fail": "MODEL_STREAM_BROKEN"}


class Numbered(Interceptor):
    """Tells the script which attempt it plays, and keeps what the engine said between attempts."""

    def __init__(self, between: Callable[[Trace], Awaitable[None]] | None = None) -> None:
        super().__init__(name="numbered")
        self.between = between
        self.retries: list[tuple[str, int]] = []

    async def on_prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> None:
        prompt.instructions += f" attempt {len(self.retries) + 1}."

    async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        self.retries.append((error.reason, attempt))
        if self.between is not None:
            await self.between(trace)
        return False


def attempts(*said: Sequence[dict[str, object]], step: int = 0) -> list[dict[str, object]]:
    """Turns of a script: what each attempt at a step says."""
    return [
        {"when": {"step": step, "system": rf"attempt {number}\."}, "say": list(items)}
        for number, items in enumerate(said, 1)
    ]


def payloads(asked: Asked) -> list[str]:
    return [event.WhichOneof("payload") or "" for event in asked.events]


SECOND: dict[str, list[dict[str, object]]] = {
    "agreeing": [{"reasoning": "hm"}, {"text": "Hello, 世界! 🎉 fine", "chunk": 3}],
    "differing at once": [{"reasoning": "hm"}, {"text": "Good day", "chunk": 3}],
    "differing late": [{"reasoning": "hm"}, {"text": "Hello, 世人", "chunk": 1}],
    "shorter": [{"reasoning": "hm"}, {"text": "Hello", "chunk": 2}],
    "turning to a tool": [{"reasoning": "hm"}, {"call": "echo", "args": {"text": "x"}}],
    "with other reasoning": [{"reasoning": "no"}, {"text": "Hello, 世界! 🎉 fine"}],
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("second", list(SECOND))
@pytest.mark.parametrize("shown", ["", "H", "Hello, 世界", "Hello, 世界! 🎉"])
async def test_a_broken_stream_costs_no_token_and_doubles_none(
    open_engine: Opener, mode: str, second: str, shown: str
) -> None:
    """Whatever the second attempt says: the folded text is the final text, and one rewind at most was needed."""
    first: list[dict[str, object]] = [{"reasoning": "hm"}, *([{"text": shown, "chunk": 1}] if shown else []), BREAK]
    numbered = Numbered()
    script = [*attempts(first, SECOND[second]), turn(1, {"text": "after the tool"})]
    model = scripted(*script, continues=True)
    agent = Agent("a", tools=[echo], interceptors=[numbered], models=[model], retry=QUICK)
    asked = await (await open_engine(agent)).ask("go", options=RunOptions(retry_mode=MODES[mode]))
    done, rewinds = asked.last.done, payloads(asked).count("rewind")
    assert numbered.retries == [("MODEL_STREAM_BROKEN", 1)]
    assert done.stop_reason == StopReason.STOP_REASON_FINISHED
    said = "".join(str(item.get("text", "")) for item in SECOND[second])
    continued = mode == "continue" and bool(shown)
    if continued:  # what it says follows what is shown, unless it repeats it
        said = said if said.startswith(shown) else shown + said
    after = "after the tool" if second == "turning to a tool" else ""
    assert done.content == "\n\n".join(filter(None, [said, after]))
    agrees = said.startswith(shown) and second != "with other reasoning"
    assert rewinds == (0 if agrees or continued or mode == "hold" else 1)


async def test_live_shows_the_first_token_before_the_first_attempt_is_over(open_engine: Opener) -> None:
    """A client has text of an attempt that then breaks; in HOLD it has nothing yet."""
    engines: list[Engine] = []
    seen: list[int] = []

    async def between(trace: Trace) -> None:
        if trace.options.retry_mode == RetryMode.RETRY_MODE_LIVE:
            await engines[0].wait_for(trace.key, bool)
        seen.append((await engines[0].store.head(trace.key)).last_seq)

    numbered = Numbered(between)
    script = attempts([{"text": "Hello", "chunk": 1}, BREAK], [{"text": "Hello you"}])
    engines.append(await open_engine(Agent("a", interceptors=[numbered], retry=QUICK), *script))
    for mode in (RetryMode.RETRY_MODE_LIVE, RetryMode.RETRY_MODE_HOLD):
        asked = await engines[0].ask("go", options=RunOptions(retry_mode=mode))
        assert asked.last.done.content == "Hello you"
        assert "rewind" not in payloads(asked)
        numbered.retries.clear()
    assert seen[0] >= 1
    assert seen[1] == 0


async def test_an_exhausted_retry_keeps_what_was_shown(open_engine: Opener) -> None:
    """After the last attempt there is a typed error; the text stays in the stream and in the conversation."""
    numbered = Numbered()
    broken: list[dict[str, object]] = [{"text": "Hel"}, BREAK]
    engine = await open_engine(Agent("a", interceptors=[numbered], retry=QUICK), *attempts(broken, broken, broken))
    asked = await engine.ask("go")
    assert payloads(asked) == ["delta", "error"]
    assert asked.last.error.diagnosis.code == "model.stream_broken"
    assert numbered.retries == [("MODEL_STREAM_BROKEN", 1), ("MODEL_STREAM_BROKEN", 2)]
    assert texts((await engine.messages(asked.conversation_id))[-1]) == "Hel"
    assert (await engine.store.head(asked.key)).state == RunState.RUN_STATE_FAILED


@pytest.mark.parametrize("reason", ["MODEL_AUTH", "MODEL_BAD_RESPONSE"])
async def test_what_cannot_help_is_not_tried_again(open_engine: Opener, reason: str) -> None:
    """A refused key and a bad request fail at once, though interceptors are asked whether they can mend it."""
    numbered = Numbered()
    engine = await open_engine(Agent("a", interceptors=[numbered], retry=QUICK), *attempts([{"fail": reason}]))
    asked = await engine.ask("go")
    assert payloads(asked) == ["error"]
    assert numbered.retries == [(reason, 1)]


async def test_no_attempt_follows_a_cancel(open_engine: Opener) -> None:
    """A run that is cancelled while it waits for its next attempt ends at once, with what it had shown."""
    numbered = Numbered()
    patient = RetryPolicy(attempts=3, first_delay=30.0)
    script = attempts([{"text": "Hel"}, {"fail": "MODEL_OVERLOADED", "retry_after": 30}], [{"text": "never"}])
    engine = await open_engine(Agent("a", interceptors=[numbered], retry=patient), *script)
    started = await engine.start("go")
    await engine.wait_for(started.head.key, bool)
    await until(lambda: bool(numbered.retries))
    await engine.cancel(started.head.key)
    asked = await engine.read(started)
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert asked.last.done.content == "Hel"
    assert len(numbered.retries) == 1


class Shortens(Interceptor):
    """Makes the context fit."""

    def __init__(self, *, helps: bool) -> None:
        super().__init__(name="shortens")
        self.helps = helps
        self.sent: list[int] = []

    async def on_prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> None:
        self.sent.append(len(prompt.messages))
        prompt.instructions += f" attempt {len(self.sent)}."

    async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        if error.reason != "CONTEXT_OVERFLOW" or not self.helps:
            return False
        prompt.messages = [Message.FromString(prompt.messages[-1].SerializeToString())]
        trace.rewrite_context(prompt.messages)
        return True


@pytest.mark.parametrize("helps", [True, False])
async def test_an_overflow_is_mended_by_whoever_shortens_the_context_or_ends_typed(
    open_engine: Opener, helps: bool
) -> None:
    """With help the same call is made with less, at once; without, the run ends as CONTEXT_OVERFLOW, not in retries."""
    shortens = Shortens(helps=helps)
    script = attempts([{"fail": "CONTEXT_OVERFLOW"}], [{"text": "fits"}])
    agent = Agent("a", interceptors=[shortens], retry=RetryPolicy(first_delay=60.0, max_delay=60.0))
    engine = await open_engine(agent, {"when": {"user": "first"}, "say": [{"text": "one"}]}, *script)
    first = await engine.ask("first")
    shortens.sent.clear()
    asked = await engine.ask("go", conversation=first.conversation_id)
    if helps:
        assert shortens.sent == [3, 1]
        assert asked.last.done.content == "fits"
    else:
        assert shortens.sent == [3]
        assert asked.last.error.diagnosis.code == "context.overflow"


async def test_shortening_a_context_takes_no_attempt_away(open_engine: Opener) -> None:
    """A context that overflows four times and then meets two transient failures still gets its answer."""
    heard: list[tuple[str, int]] = []

    class Shrinks(Numbered):
        async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
            await super().on_reason_retry(trace, error, attempt, prompt)
            heard.append((error.reason, attempt))
            return error.reason == "CONTEXT_OVERFLOW"

    overflow: list[dict[str, object]] = [{"fail": "CONTEXT_OVERFLOW"}]
    busy: list[dict[str, object]] = [{"fail": "MODEL_OVERLOADED"}]
    script = attempts(overflow, overflow, overflow, overflow, busy, busy, [{"text": "at last"}])
    engine = await open_engine(Agent("a", interceptors=[Shrinks()], retry=QUICK), *script)
    assert (await engine.ask("go")).last.done.content == "at last"
    assert heard == [("CONTEXT_OVERFLOW", n) for n in (1, 2, 3, 4)] + [("MODEL_OVERLOADED", n) for n in (1, 2)]


async def test_a_router_falls_back_inside_an_attempt_and_rewinds_where_the_models_differ(store: RunStore) -> None:
    """The second model begins anew: clients see one rewind with its text, and no retry was counted."""
    numbered = Numbered()
    first = scripted(*attempts([{"text": "Bonjour"}, {"fail": "MODEL_UNAVAILABLE"}]), name="first")
    second = scripted(*attempts([{"text": "Bonsoir", "chunk": 1}]), name="second")
    agent = Agent("a", interceptors=[numbered], models=[RouterModel([first, second])], retry=QUICK)
    async with at_work_with(store, [agent]) as engine:
        asked = await engine.ask("go")
    assert payloads(asked).count("rewind") == 1
    rewind = next(event.rewind for event in asked.events if event.WhichOneof("payload") == "rewind")
    assert rewind.content == "Bons"
    assert "MODEL_UNAVAILABLE" in rewind.reason
    assert asked.last.done.content == "Bonsoir"
    assert numbered.retries == []


async def test_what_failed_attempts_cost_is_counted(open_engine: Opener) -> None:
    """Usage of an attempt that broke is added to that of the one that answered."""
    cost: dict[str, object] = {"usage": {"input_tokens": 10, "output_tokens": 2}}
    numbered = Numbered()
    script = attempts([{"text": "Hel"}, cost, BREAK], [{"text": "Hello"}, cost])
    engine = await open_engine(Agent("a", interceptors=[numbered], retry=QUICK), *script)
    usage = (await engine.ask("go")).last.done.usage
    assert (usage.input_tokens, usage.output_tokens) == (20, 4)


async def test_a_second_answer_is_set_apart_also_when_its_first_attempt_broke(open_engine: Opener) -> None:
    """The separator before a later answer is neither lost nor doubled by a retry."""
    numbered = Numbered()
    numbered.retries = []
    script = [
        turn(0, {"text": "Looking."}, {"call": "echo", "args": {"text": "x"}}),
        *attempts([{"text": "Fou"}, BREAK], [{"text": "Nothing"}], step=1),
    ]
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[numbered], retry=QUICK), *script)
    asked = await engine.ask("go")
    assert asked.last.done.content == "Looking.\n\nNothing"


def test_the_script_is_what_it_says() -> None:
    """Scripts of this file parse, so that a typo in one does not pass as a model failure."""
    for said in SECOND.values():
        assert isinstance(scripted(*attempts(said)), ScriptedModel)


async def test_only_a_stream_that_leaves_no_room_for_others_is_made_to() -> None:
    """One that waits by itself is never made to wait; one that is never idle is, soon after it began to be."""
    breath = Breath()
    for _ in range(3):
        await asyncio.sleep(2 * BREATH)
        assert not breath.due()
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not breath.due():
        assert loop.time() < began + TIMEOUT
