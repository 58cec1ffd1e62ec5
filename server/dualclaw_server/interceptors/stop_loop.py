"""Loops are recognised by what calls bring, not by their names, and ended step by step.

Terms

- A *fingerprint* is the digest of a call: name, arguments in one order of keys, and result.
- A *round* is the batch of calls of one model answer. It makes *progress* when one of its fingerprints is in none
  of the ``window`` rounds before it. So the same call with another result is progress, and so is a batch that
  grows by a new call; one that grows by the same call is not.
- A tool in ``allow`` waits for something: its fingerprint counts as progress until it has come that often.
- The run is *stuck* for as many rounds as have come since the last one with progress.

Steps

| stuck for | what is done |
| --- | --- |
| 1 or more, and a call is there ``repeats`` times in the window, or stuck for half a window | the model is told so before it answers |
| ``window`` | a call that is repeated once more is not run: what can only be read is answered from before and says so; what acts is refused and says that too, for "sent" must not be claimed of what was not sent again. A call that failed last time runs |
| ``window`` + 1 | one call without tools, for an answer from what is known; the run ends with it, LOOP_DETECTED |

Until a whole window has passed without progress, nothing but words is done: a run with something new in each
window is never ended. A loop of k <= window rounds after p others is ended within p + k + window + 2 model calls;
allowances add their number of rounds. With the defaults that is 11 calls for a call repeated from the start on.

All of it is a function of the transcript, looked at once before each model call. What was found then, and which
calls were answered from before, is kept in the run's extras, so it is the same after a crash or a resume.
"""  # noqa: E501  # table rows

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from dualclaw import ContentPart, Message, ToolCall, ToolResult
from dualclaw.events import canonical_json, make_diagnosis, parse_args
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Observation, Prompt
from dualclaw_server.engine.model import ModelResponse
from dualclaw_server.engine.outcome import End, Outcome, Replace
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.trace import Trace

CODE = "loop.warned"
"""Code of the diagnosis beside a call that was not run again."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What models and people are told."""

    hint: str
    last: str
    again: str
    """Beside a result that was given before."""
    refused: str
    ended: str
    """Shown when even the call without tools gave no answer."""


TEXTS: Mapping[Locale, Texts] = MappingProxyType(
    {
        "en": Texts(
            hint="You are repeating tool calls that bring nothing new ({names}). Do not make the same call again. Use "
            "what you have, try something different, or say plainly what is missing.",
            last="Your tool calls have brought nothing new for a while, and tools are no longer available. Answer now "
            "with what you know, and say plainly what could not be done.",
            again="[{name} was not run again: the same call has given this result before.]",
            refused="{name} was not run again: the same call was made before and brought the same each time.",
            ended="The run was ended because it repeated itself without getting further.",
        ),
        "zh": Texts(
            hint="你在重复没有带来新信息的工具调用（{names}）。不要再发起相同的调用。请利用已有信息、换一种方法，"
            "或直接说明缺少什么。",
            last="你的工具调用已有一段时间没有带来新信息，工具不再可用。请根据已知信息直接回答，并如实说明未能完成的部分。",
            again="[{name} 未再次执行：相同的调用之前已给出此结果。]",
            refused="{name} 未再次执行：相同的调用之前已执行过，每次结果都相同。",
            ended="运行因不断重复而没有进展，已被终止。",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Done:
    """A finished call."""

    name: str
    key: str
    """Digest of name and arguments."""
    fingerprint: str
    result: ToolResult


Round = Sequence[Done]


class StopLoopInterceptor(Interceptor):
    """Ends runs that repeat themselves.

    Args:
        repeats: times a call must have brought the same before the model is told; at least 2. Default 3.
        window: rounds within which something new must come; at least ``repeats``, at most 50. Default 8.
        allow: by tool name, how often the same call may bring the same before it counts; for tools that poll.
        locale: language of what models and people are told.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self,
        repeats: int = 3,
        window: int = 8,
        *,
        allow: Mapping[str, int] = MappingProxyType({}),
        locale: Locale = "en",
        name: str = "",
        order: int = 0,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = False,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled, switchable=switchable, fail_closed=fail_closed)
        if not 2 <= repeats <= window <= 50:
            raise ValueError(f"2 <= repeats <= window <= 50 must hold, not repeats={repeats}, window={window}")
        for tool, times in allow.items():
            if times < 1:
                raise ValueError(f"allow: {tool} must be allowed at least 1 call, not {times}")
        self._repeats, self._window, self._allow = repeats, window, dict(allow)
        self._texts = TEXTS[locale]
        self._longest = max([window, *self._allow.values()])

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        """Tell the model, or take its tools away."""
        rounds = self._rounds(trace)
        stuck = self.stuck(rounds)
        if stuck != self._found(trace):
            trace.extras(self.name).set("stuck", stuck)
        if stuck > self._window:
            prompt.tools = []
            prompt.options = replace(prompt.options, tool_choice="none")
            _add(prompt, self._texts.last)
        elif stuck and (names := self._repeated(rounds, stuck)):
            _add(prompt, self._texts.hint.format(names=", ".join(names)))
        return None

    async def on_reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Outcome | None:
        """End the run with the answer that was given without tools."""
        calls = any(part.WhichOneof("part") == "tool_call" for part in message.parts)
        if calls or self._found(trace) <= self._window:
            return None
        told = any(part.text.strip() for part in message.parts)
        return End("" if told else self._texts.ended, "loop_detected")

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        """End a run whose model calls tools although it was given none."""
        if self._found(trace) > self._window:
            return End(self._texts.ended, "loop_detected")
        return None

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Outcome | None:
        """Answer a call from before when a whole window brought nothing new."""
        if self._found(trace) < self._window or call.decision is not None:  # a person wanted it all the same
            return None
        key = _key(call.name, call.args)
        before = next((done for batch in reversed(self._rounds(trace)) for done in batch if done.key == key), None)
        if before is None or before.result.is_error:
            return None
        extras = trace.extras(self.name)
        answered = extras.get_as("answered", dict[str, str], {})
        extras.set("answered", {**answered, call.id: before.fingerprint})
        return Replace(self._from_before(call, before))

    def _from_before(self, call: Call, before: Done) -> Observation:
        if call.tool is not None and call.tool.effect == "read":
            note = self._texts.again.format(name=call.name)
            diagnosis = make_diagnosis(code=CODE, severity="warning", summary=note.strip("[]"))
            return Observation(parts=(*before.result.parts, ContentPart(text=note)), diagnosis=diagnosis)
        text = self._texts.refused.format(name=call.name)
        told = canonical_json({"error": {"code": CODE, "message": text, "retryable": False}})
        diagnosis = make_diagnosis(code=CODE, severity="warning", summary=text)
        return Observation(parts=(ContentPart(text=told),), diagnosis=diagnosis, is_error=True, not_done=True)

    def _found(self, trace: Trace) -> int:
        """Return for how many rounds the run was stuck before the last model call."""
        return trace.extras(self.name).get_as("stuck", int, 0)

    def stuck(self, rounds: Sequence[Round]) -> int:
        """Return how many rounds at the end brought nothing new; counts no further than window + 1."""
        count = 0
        while count <= self._window and count < len(rounds) and not self._progress(rounds[: len(rounds) - count]):
            count += 1
        return count

    def _progress(self, rounds: Sequence[Round]) -> bool:
        """Tell whether the last of these rounds brought something new."""
        near = {done.fingerprint for batch in rounds[-self._window - 1 : -1] for done in batch}
        for done in rounds[-1]:
            if done.fingerprint not in near:
                return True
            if (allowed := self._allow.get(done.name)) is not None:
                came = sum(
                    any(d.fingerprint == done.fingerprint for d in batch) for batch in rounds[-self._longest - 1 :]
                )
                if came <= allowed:
                    return True
        return False

    def _repeated(self, rounds: Sequence[Round], stuck: int) -> list[str]:
        """Return names of tools the model is to be told of; none: not yet."""
        near = rounds[-self._window - 1 :]
        times = Counter(fingerprint for batch in near for fingerprint in {done.fingerprint for done in batch})
        last = sorted({(done.name, times[done.fingerprint]) for done in rounds[-1]})
        if 2 * stuck >= self._window:
            return sorted({name for name, _ in last})
        return sorted({name for name, count in last if count >= self._repeats})

    def _rounds(self, trace: Trace) -> list[Round]:
        """Return the newest finished rounds of the transcript, as many as matter, oldest first."""
        answered = trace.extras(self.name).get_as("answered", dict[str, str], {})
        results: dict[str, ToolResult] = {}
        rounds: list[Round] = []
        for message in reversed(trace.own_messages()):
            calls = [part.tool_call for part in message.parts if part.WhichOneof("part") == "tool_call"]
            if calls and all(call.id in results for call in calls):
                rounds.append([_done(call, results[call.id], answered) for call in calls])
                if len(rounds) > self._window + self._longest + 1:
                    break
            for part in message.parts:
                if part.WhichOneof("part") == "tool_result":
                    results[part.tool_result.call_id] = part.tool_result
        return rounds[::-1]


def _done(call: ToolCall, result: ToolResult, answered: Mapping[str, str]) -> Done:
    key = _key(call.name, parse_args(call.args_json))
    digest = hashlib.sha256(key.encode())
    digest.update(b"error" if result.is_error else b"result")
    for part in result.parts:
        data = part.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "big") + data)
    return Done(call.name, key, answered.get(call.id) or digest.hexdigest()[:32], result)


def _key(name: str, args: Mapping[str, object]) -> str:
    text = json.dumps([name, dict(args)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _add(prompt: Prompt, text: str) -> None:
    prompt.instructions = f"{prompt.instructions}\n\n{text}" if prompt.instructions else text
