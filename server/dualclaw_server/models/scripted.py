"""A model that plays a file: deterministic, offline, at any pace, failing on demand.

It is stateless: which turn it plays follows from the request alone, so a process that was killed and started
again plays on as if nothing had happened, and any number of conversations share one script.

The file is one JSON object: ``{"name": "demo", "turns": [{"when": {...}, "say": [...]}, ...]}``. The first turn
whose ``when`` fits is played; if none fits the call fails with MODEL_BAD_RESPONSE. Beside them may stand
``"traits": {"context_window": 8000, "continues": true, "images": false, "native_tools": false}``.

``when`` (all given must fit; regular expressions are searched, not anchored):

| key | fits |
| --- | --- |
| ``user`` | regular expression on the text of the last user message |
| ``step`` | number of assistant messages after the last user message, from 0 |
| ``tool_result`` | regular expression on the newest tool result after the last user message |
| ``tools`` | true: tools are bound to the model; false: none are; a name: that tool is |
| ``system`` | regular expression on the instructions |
| ``prefix`` | regular expression on the beginning of the answer that is shown already; without one it is "" |

``say``, played in order:

| item | does |
| --- | --- |
| ``{"text": "...", "chunk": 4, "delay": 0.02}`` | text; code points per delta (0: all in one), seconds between them |
| ``{"reasoning": "..."}`` | reasoning; same keys |
| ``{"call": "tool", "args": {...}}`` | a tool call; optional ``id``; ``raw_args`` instead of args sends any text |
| ``{"sleep": 1.5}`` | silence in seconds |
| ``{"hang": true}`` | silence until cancelled |
| ``{"fail": "MODEL_OVERLOADED"}`` | an error; optional ``message``, ``retryable``, ``retry_after``, ``after`` (below) |
| ``{"usage": {"input_tokens": 3}}`` | usage of the answer; also output_tokens, reasoning_tokens, cached_tokens |
| ``{"finish": "length"}`` | finish reason, if the answer has no calls |
| ``{"replay": "file.sse", "api": "chat"}`` | a recorded answer of a vendor, whole (below); no other item may say more |

``after`` is how many seconds pass before the failure. Several ``usage`` and ``finish`` items: the last counts.

``replay`` names a file beside the script with the body of a vendor's answer (``dualclaw-server record`` makes such
files), ``api`` whose it is: "chat", "responses" or "anthropic"; not needed where the recording's note says it. It is
read by the code that reads the live answer (``replay``). ``splits`` cuts it: a number of bytes for each piece, a list
of such numbers (the last for all that follow), "bytes" for single ones, "recorded" as it came; ``delay`` seconds
stand between the pieces. Only ``sleep`` may stand before it. It is always played from its beginning.

Placeholders in texts, arguments and raw_args, and nothing else in braces: ``{{user}}`` the last user text,
``{{result}}`` the newest tool result, ``{{result:NAME}}`` the newest one of that tool, both after the last user
message, ``{{match:NAME}}`` a named group of this turn's regular expressions. What they stand for is not looked
at again.

With ``continues`` a request may hold the beginning of the answer. When the turn's text starts with it, only what
follows is played: text, reasoning, sleeps and failures that stand before its end were played the time before.
When it does not, the whole turn is what follows.

A call without id gets one that follows from the conversation: the same for the same request, and unique in it.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import cast

from dualclaw import ContentPart, Message, ReasoningPart, Role, ToolResult, Usage
from dualclaw.errors import Reason
from dualclaw.events import canonical_json, clean_text
from dualclaw_server.engine.model import (
    FinishReason,
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ReasoningDelta,
    TextDelta,
    ToolSpec,
)
from dualclaw_server.models.history import call_ids
from dualclaw_server.models.script_file import (
    Call,
    Fail,
    Replay,
    Report,
    Say,
    Script,
    ScriptError,
    Sleep,
    Turn,
    When,
    load_script,
    parse_script,
)
from dualclaw_server.models.tool_calls import AssembledCall, ToolCallAssembler

__all__ = ["ScriptError", "ScriptedModel"]

_PLACEHOLDER = re.compile(r"\{\{(user|result|result:[^{}]+|match:[^{}]+)\}\}")


@dataclass(frozen=True, slots=True)
class _Scene:
    """What a request comes to: all that turns and placeholders can see."""

    user: str
    system: str
    prefix: str
    step: int
    result: str | None
    results: dict[str, str]
    tools: frozenset[str]
    seed: str

    def fits(self, when: When) -> dict[str, str] | None:
        """Return the named groups of the turn's patterns, or None if the turn does not fit."""
        bound = when.tools in self.tools if isinstance(when.tools, str) else when.tools in (None, bool(self.tools))
        if when.step not in (None, self.step) or not bound:
            return None
        groups: dict[str, str] = {}
        patterns = (
            (when.user, self.user),
            (when.tool_result, self.result),
            (when.system, self.system),
            (when.prefix, self.prefix),
        )
        for pattern, text in patterns:
            if pattern is None:
                continue
            found = pattern.search(text) if text is not None else None
            if found is None:
                return None
            groups |= {name: value or "" for name, value in found.groupdict().items()}
        return groups


@dataclass(slots=True)
class _Answer:
    """The answer so far."""

    calls: list[AssembledCall] = field(default_factory=list)
    parts: list[tuple[str, list[str]]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    finish: FinishReason = "stop"

    def add(self, kind: str, text: str) -> None:
        if not self.parts or self.parts[-1][0] != kind or kind == "call":
            self.parts.append((kind, []))
        self.parts[-1][1].append(text)


class ScriptedModel:
    """Plays a script. ``load`` a file, or ``shipped`` for the one of the demo agent.

    Args:
        script: what to play.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tools: tuple[ToolSpec, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> "ScriptedModel":
        """Return a model that plays a file. Raises ScriptError, which names every mistake with its place."""
        return cls(load_script(Path(path)))

    @classmethod
    def parse(cls, text: str) -> "ScriptedModel":
        """Return a model that plays a script given as text. Raises ScriptError."""
        return cls(parse_script(text))

    @classmethod
    def shipped(cls) -> "ScriptedModel":
        """Return a model that plays the script of the demo agent."""
        return cls(parse_script((files(__package__) / "assistant.json").read_text("utf-8"), "assistant.json"))

    @property
    def name(self) -> str:
        """The script's name."""
        return self._script.name

    @property
    def traits(self) -> ModelTraits:
        """What the script says it can do."""
        return self._script.traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> "ScriptedModel":
        """Return a new model that knows which tools it may call, for ``tools`` in a ``when``."""
        made = ScriptedModel(self._script)
        made._tools = tuple(tools)
        return made

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Play the turn that fits the request. Raises ModelError."""
        scene = _scene(request, tools=frozenset(tool.name for tool in self._tools))
        turn, groups = self._choose(scene)
        taken = call_ids(request.messages)
        answer = _Answer()
        shown = self._shown(turn, scene, groups)
        for item in turn.say:
            match item:
                case Say(kind="reasoning") | Sleep() | Fail() if shown:
                    continue
                case Say():
                    made = TextDelta if item.kind == "text" else ReasoningDelta
                    text = _fill(item.text, scene, groups)
                    left, shown = text[shown:], max(0, shown - len(text))
                    for number, piece in enumerate(_cut(left, item.chunk)):
                        # Without a delay the loop still gets its turn, so that a long text can be cancelled.
                        await asyncio.sleep(item.delay if number else 0)
                        answer.add(item.kind, piece)
                        yield made(piece)
                case Call():
                    _add_call(answer, item, scene, groups, taken)
                case Sleep(seconds=seconds):
                    await _sleep(seconds)
                case Fail():
                    await _sleep(item.after)
                    reason = cast("Reason", item.reason)
                    raise ModelError(
                        reason,
                        item.message,
                        retryable=item.retryable,
                        retry_after=item.retry_after,
                        usage=answer.usage if answer.usage.ListFields() else None,
                    )
                case Report():
                    if item.usage is not None:
                        answer.usage = Usage(**item.usage)
                    if item.finish is not None:
                        answer.finish = cast("FinishReason", item.finish)
                case Replay():
                    async with aclosing(self._replay(item, request)) as recorded:
                        async for chunk in recorded:
                            yield chunk
                    return
        yield self._response(answer)

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Play the turn and return its response. Raises ModelError."""
        async with aclosing(self.stream(request)) as stream:
            async for item in stream:
                if isinstance(item, ModelResponse):
                    return item
        raise AssertionError("a stream ends with its response")

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _replay(self, item: Replay, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Let the recording's vendor answer the request."""
        model = item.recording.model()
        try:
            bound = model.with_tools(self._tools)
            async with aclosing(bound.stream(replace(request, prefix=""))) as stream:
                async for chunk in stream:
                    yield chunk
        finally:
            await model.aclose()

    def _choose(self, scene: _Scene) -> tuple[Turn, dict[str, str]]:
        for turn in self._script.turns:
            groups = scene.fits(turn.when)
            if groups is not None:
                return turn, groups
        turns = ", ".join(f"turns[{number}] {turn.when}" for number, turn in enumerate(self._script.turns))
        raise ModelError(
            "MODEL_BAD_RESPONSE",
            f"No turn of script {self.name!r} fits (step {scene.step}, tools {str(scene.tools).lower()}).",
            retryable=False,
            detail=f"The script has {turns}.",
            hint='Add a turn with "when": {} at the end to answer everything else.',
        )

    def _shown(self, turn: Turn, scene: _Scene, groups: dict[str, str]) -> int:
        """Return how many characters of the turn's text are shown already."""
        if not (self.traits.continues and scene.prefix):
            return 0
        said = (_fill(item.text, scene, groups) for item in turn.say if isinstance(item, Say) and item.kind == "text")
        return len(scene.prefix) if "".join(said).startswith(scene.prefix) else 0

    def _response(self, answer: _Answer) -> ModelResponse:
        calls = answer.calls
        remaining = iter(calls)
        parts: list[ContentPart] = []
        for kind, pieces in answer.parts:
            match kind:
                case "text":
                    parts.append(ContentPart(text="".join(pieces)))
                case "reasoning":
                    parts.append(ContentPart(reasoning=ReasoningPart(text="".join(pieces))))
                case _:
                    parts.append(ContentPart(tool_call=next(remaining).call))
        return ModelResponse(
            message=Message(role=Role.ROLE_ASSISTANT, parts=parts),
            finish_reason="tool_calls" if calls else "stop" if answer.finish == "tool_calls" else answer.finish,
            usage=answer.usage,
            bad_arguments={call.call.id: call.bad_arguments for call in calls if call.bad_arguments is not None},
            model=self.name,
        )


def _scene(request: ModelRequest, *, tools: frozenset[str]) -> _Scene:
    messages = request.messages
    start = max((i for i, message in enumerate(messages) if message.role == Role.ROLE_USER), default=-1)
    since = messages[start + 1 :]
    names: dict[str, str] = {}
    newest: str | None = None
    results: dict[str, str] = {}
    for message in since:
        for part in message.parts:
            match part.WhichOneof("part"):
                case "tool_call":
                    names[part.tool_call.id] = part.tool_call.name
                case "tool_result":
                    newest = _result_text(part.tool_result)
                    results[names.get(part.tool_result.call_id, "")] = newest
    user = _text(messages[start].parts) if start >= 0 else ""
    marks = [messages[start].id if start >= 0 else "", messages[-1].id if messages else "", str(len(messages)), user]
    return _Scene(
        user=user,
        system=request.instructions,
        prefix=request.prefix,
        step=sum(message.role == Role.ROLE_ASSISTANT for message in since),
        result=newest,
        results=results,
        tools=tools,
        seed=hashlib.sha256("\0".join(marks).encode("utf-8", "replace")).hexdigest()[:8],
    )


def _fill(text: str, scene: _Scene, groups: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        kind, _, name = found[1].partition(":")
        match kind:
            case "user":
                return scene.user
            case "match":
                return groups.get(name, "")
            case _:
                return scene.results.get(name, "") if name else scene.result or ""

    return clean_text(_PLACEHOLDER.sub(value, text))


def _fill_all(value: object, scene: _Scene, groups: dict[str, str]) -> object:
    if isinstance(value, str):
        return _fill(value, scene, groups)
    if isinstance(value, dict):
        return {key: _fill_all(inner, scene, groups) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_all(inner, scene, groups) for inner in value]
    return value


def _add_call(answer: _Answer, item: Call, scene: _Scene, groups: dict[str, str], taken: frozenset[str]) -> None:
    number = len(answer.calls)
    call_id = item.id
    if not call_id:
        base = call_id = f"call_{scene.step}_{number}_{scene.seed}"
        again = 1
        while call_id in taken:
            again += 1
            call_id = f"{base}_{again}"
    arguments = item.raw_args
    if arguments is None:
        arguments = canonical_json(_fill_all(dict(item.args), scene, groups))
    else:
        arguments = _fill(arguments, scene, groups)
    # An assembler of its own keeps calls apart even when the script gives two of them the same id.
    assembler = ToolCallAssembler({*taken, *(made.call.id for made in answer.calls)})
    assembler.feed(call_id=call_id, name=item.name, arguments=arguments)
    answer.calls += assembler.finish()
    answer.add("call", "")


def _cut(text: str, chunk: int) -> Iterable[str]:
    size = chunk or len(text)
    return (text[at : at + size] for at in range(0, len(text), size)) if text else ()


async def _sleep(seconds: float) -> None:
    if seconds == float("inf"):
        await asyncio.get_running_loop().create_future()
    await asyncio.sleep(seconds)


def _text(parts: Iterable[ContentPart]) -> str:
    return "\n".join(part.text for part in parts if part.WhichOneof("part") == "text")


def _result_text(result: ToolResult) -> str:
    return _text(result.parts) or (result.diagnosis.summary if result.is_error else "")
