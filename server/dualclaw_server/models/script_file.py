"""Reads the file that a scripted model plays; ``scripted`` documents its form.

Every mistake of a file is found at once and named with its place ("turns[2].say[0].delay: ..."), because the
person who wrote it cannot step through it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard, get_args

from dualclaw.errors import REASONS
from dualclaw_server.engine.model import FinishReason, ModelTraits
from dualclaw_server.models.replay import Recording, RecordingError, Splits, load_recording

_FAILURES = frozenset(reason for reason in REASONS if reason.startswith("MODEL_")) | {"CONTEXT_OVERFLOW"}
_NOT_RETRYABLE = frozenset({"MODEL_AUTH", "MODEL_BAD_RESPONSE", "CONTEXT_OVERFLOW"})
_FINISHES = frozenset(get_args(FinishReason))
_USAGE = frozenset({"input_tokens", "output_tokens", "reasoning_tokens", "cached_tokens"})
_PATTERNS = ("user", "tool_result", "system", "prefix")
_MATCH = re.compile(r"\{\{match:([^{}]*)\}\}")
_LONGEST_WAIT = 3600


class ScriptError(ValueError):
    """A script cannot be played; the text names every mistake with its place."""

    def __init__(self, origin: str, problems: list[str]) -> None:
        super().__init__(f"{origin}: " + "; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class When:
    """What a request must be for a turn to be played; None: anything."""

    user: re.Pattern[str] | None = None
    step: int | None = None
    tool_result: re.Pattern[str] | None = None
    tools: bool | str | None = None
    system: re.Pattern[str] | None = None
    prefix: re.Pattern[str] | None = None

    def __str__(self) -> str:
        found = {name: getattr(self, name) for name in self.__slots__}
        shown = {name: value.pattern if isinstance(value, re.Pattern) else value for name, value in found.items()}
        return json.dumps({name: value for name, value in shown.items() if value is not None}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Say:
    """Text or reasoning; ``chunk`` code points per delta (0: all in one), ``delay`` seconds between deltas."""

    kind: str
    text: str
    chunk: int = 0
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: ``args`` an object, or ``raw_args`` a text that is sent as it is."""

    name: str
    args: Mapping[str, object] = field(default_factory=dict)
    raw_args: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Silence, in seconds; infinite: until cancelled."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The call fails, after so many seconds."""

    reason: str
    message: str
    retryable: bool
    retry_after: float | None = None
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What the answer says about itself."""

    usage: Mapping[str, int] | None = None
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """A vendor's answer as it was recorded."""

    recording: Recording


Item = Say | Call | Sleep | Fail | Report | Replay


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and when to give it."""

    when: When
    say: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A whole file."""

    name: str
    turns: tuple[Turn, ...]
    traits: ModelTraits = field(default_factory=ModelTraits)


def load_script(path: Path) -> Script:
    """Read a script from a file. Raises ScriptError."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ScriptError(str(path), [f"cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ScriptError(str(path), ["is not UTF-8"]) from None
    return parse_script(text, str(path), folder=path.parent)


def parse_script(text: str, origin: str = "script", *, folder: Path | None = None) -> Script:
    """Read a script from its text.

    Args:
        text: the JSON.
        origin: what errors call it.
        folder: where relative paths in it begin; None: it may have none.

    Raises:
        ScriptError: with all mistakes; ``origin`` comes first in its text.
    """
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScriptError(origin, [f"is not JSON: {error}"]) from None
    reader = _Reader(folder)
    script = reader.script(value)
    if reader.problems:
        raise ScriptError(origin, reader.problems)
    return script


class _Reader:
    """Reads values and notes what is wrong; what it returns beside a note is never used."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.problems: list[str] = []

    def script(self, value: object) -> Script:
        if not _is_object(value):
            self._wrong("", "must be an object with name and turns")
            return Script("", ())
        self._only("", value, {"name", "turns", "traits"})
        turns = value.get("turns")
        if not isinstance(turns, list) or not turns:
            self._wrong("turns", "must be a list with at least one turn")
            turns = []
        name = self._string("", value, "name", default="scripted")
        read = tuple(self._turn(f"turns[{i}]", turn) for i, turn in enumerate(turns))
        return Script(name, read, self._traits(value.get("traits", {})))

    def _traits(self, value: object) -> ModelTraits:
        if not _is_object(value):
            self._wrong("traits", "must be an object")
            return ModelTraits()
        self._only("traits", value, set(ModelTraits.__slots__))
        traits = ModelTraits()
        window = value.get("context_window", traits.context_window)
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            self._wrong("traits.context_window", "must be a whole number of tokens from 1")
            window = traits.context_window
        return ModelTraits(
            context_window=window,
            continues=self._flag("traits", value, "continues", default=traits.continues),
            images=self._flag("traits", value, "images", default=traits.images),
            native_tools=self._flag("traits", value, "native_tools", default=traits.native_tools),
        )

    def _turn(self, place: str, value: object) -> Turn:
        if not _is_object(value):
            self._wrong(place, "must be an object with when and say")
            return Turn(When(), ())
        self._only(place, value, {"when", "say"})
        when = self._when(f"{place}.when", value.get("when", {}))
        say = value.get("say")
        if not isinstance(say, list):
            self._wrong(f"{place}.say", "must be a list")
            say = []
        items = tuple(self._item(f"{place}.say[{i}]", item) for i, item in enumerate(say))
        for i, item in enumerate(items):
            if isinstance(item, Replay) and not (i == len(say) - 1 and all(isinstance(x, Sleep) for x in items[:i])):
                self._wrong(f"{place}.say[{i}]", "replay is a whole answer: only sleep may stand beside it, before it")
        patterns = (when.user, when.tool_result, when.system, when.prefix)
        groups = {name for pattern in patterns if pattern for name in pattern.groupindex}
        for name in _MATCH.findall(json.dumps(say, ensure_ascii=False)):
            if name not in groups:
                self._wrong(f"{place}.say", f"{{{{match:{name}}}}} names no group of this turn's when")
        return Turn(when, items)

    def _when(self, place: str, value: object) -> When:
        if not _is_object(value):
            self._wrong(place, "must be an object")
            return When()
        self._only(place, value, set(When.__slots__))
        patterns: dict[str, re.Pattern[str]] = {}
        for key in _PATTERNS:
            if key in value:
                try:
                    patterns[key] = re.compile(self._string(place, value, key))
                except re.error as error:
                    self._wrong(f"{place}.{key}", f"is no regular expression: {error}")
        step = value.get("step")
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            self._wrong(f"{place}.step", "must be a whole number from 0")
            step = None
        tools = value.get("tools")
        if tools is not None and not isinstance(tools, bool | str):
            self._wrong(f"{place}.tools", "must be true, false or a tool's name")
            tools = None
        return When(step=step, tools=tools, **patterns)

    def _item(self, place: str, value: object) -> Item:
        readers = {
            "text": self._say,
            "reasoning": self._say,
            "call": self._call,
            "sleep": self._sleep,
            "hang": self._sleep,
            "fail": self._fail,
            "usage": self._report,
            "finish": self._report,
            "replay": self._replay,
        }
        found = [key for key in readers if _is_object(value) and key in value]
        if not _is_object(value) or not found or (len(found) > 1 and readers[found[0]] != self._report):
            self._wrong(place, f"must be an object with one of {', '.join(readers)}")
            return Sleep(0)
        return readers[found[0]](place, value)

    def _say(self, place: str, value: Mapping[str, object]) -> Item:
        kind = "text" if "text" in value else "reasoning"
        self._only(place, value, {kind, "chunk", "delay"})
        chunk = value.get("chunk", 0)
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 0:
            self._wrong(f"{place}.chunk", "must be a whole number of code points")
            chunk = 0
        return Say(kind, self._string(place, value, kind), chunk, self._seconds(place, value, "delay"))

    def _call(self, place: str, value: Mapping[str, object]) -> Item:
        self._only(place, value, {"call", "args", "raw_args", "id"})
        if "args" in value and "raw_args" in value:
            self._wrong(place, "has args and raw_args; it may have one")
        args = value.get("args", {})
        if not _is_object(args):
            self._wrong(f"{place}.args", "must be an object; raw_args sends any text")
            args = {}
        raw = self._string(place, value, "raw_args") if "raw_args" in value else None
        name = self._string(place, value, "call")
        if not name:
            self._wrong(f"{place}.call", "must name a tool")
        return Call(name, args, raw, self._string(place, value, "id", default=""))

    def _sleep(self, place: str, value: Mapping[str, object]) -> Item:
        if "sleep" in value:
            self._only(place, value, {"sleep"})
            return Sleep(self._seconds(place, value, "sleep"))
        self._only(place, value, {"hang"})
        if value["hang"] is not True:
            self._wrong(f"{place}.hang", "must be true")
        return Sleep(float("inf"))

    def _fail(self, place: str, value: Mapping[str, object]) -> Item:
        self._only(place, value, {"fail", "message", "retryable", "retry_after", "after"})
        reason = self._string(place, value, "fail")
        if reason not in _FAILURES:
            self._wrong(f"{place}.fail", f"must be one of {', '.join(sorted(_FAILURES))}")
        retryable = self._flag(place, value, "retryable", default=reason not in _NOT_RETRYABLE)
        wait = self._seconds(place, value, "retry_after") if "retry_after" in value else None
        message = self._string(place, value, "message", default="The script says so.")
        return Fail(reason, message, retryable, wait, self._seconds(place, value, "after"))

    def _report(self, place: str, value: Mapping[str, object]) -> Item:
        self._only(place, value, {"usage", "finish"})
        usage = value.get("usage")
        counts: dict[str, int] = {}
        if usage is not None and not _is_object(usage):
            self._wrong(f"{place}.usage", "must be an object")
        elif usage is not None:
            self._only(f"{place}.usage", usage, set(_USAGE))
            for key, count in usage.items():
                if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**31:
                    counts[key] = count
                else:
                    self._wrong(f"{place}.usage.{key}", "must be a whole number from 0")
        finish = value.get("finish")
        if "finish" in value and finish not in _FINISHES:
            self._wrong(f"{place}.finish", f"must be one of {', '.join(sorted(_FINISHES))}")
        return Report(counts if usage is not None else None, finish if isinstance(finish, str) else None)

    def _replay(self, place: str, value: Mapping[str, object]) -> Item:
        self._only(place, value, {"replay", "api", "splits", "delay"})
        path = Path(self._string(place, value, "replay"))
        api = self._string(place, value, "api") if "api" in value else None
        splits = self._splits(f"{place}.splits", value.get("splits", 0))
        delay = self._seconds(place, value, "delay")
        if self._folder is None and not path.is_absolute():
            self._wrong(f"{place}.replay", "must be an absolute path: this script is in no file it could be beside")
            return Sleep(0)
        try:
            return Replay(load_recording((self._folder or Path()) / path, api=api, splits=splits, delay=delay))
        except RecordingError as error:
            self._wrong(f"{place}.replay", f"cannot be replayed: {error}")
            return Sleep(0)

    def _splits(self, place: str, value: object) -> Splits:
        match value:
            case "recorded":
                return "recorded"
            case "bytes":
                return (1,)
            case bool():
                sizes: object = None
            case int():
                sizes = [value] if value else []
            case _:
                sizes = value
        if isinstance(sizes, list) and all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in sizes):
            return tuple(sizes)
        self._wrong(place, 'must be "bytes", "recorded", or sizes in bytes: one for all pieces, or a list')
        return ()

    def _string(self, place: str, value: Mapping[str, object], key: str, default: str | None = None) -> str:
        found = value.get(key, default)
        if isinstance(found, str):
            return found
        self._wrong(f"{place}.{key}", "must be a text")
        return ""

    def _flag(self, place: str, value: Mapping[str, object], key: str, *, default: bool) -> bool:
        found = value.get(key, default)
        if isinstance(found, bool):
            return found
        self._wrong(f"{place}.{key}", "must be true or false")
        return default

    def _seconds(self, place: str, value: Mapping[str, object], key: str) -> float:
        found = value.get(key, 0)
        if isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= _LONGEST_WAIT:
            return float(found)
        self._wrong(f"{place}.{key}", f"must be seconds from 0 to {_LONGEST_WAIT}")
        return 0.0

    def _only(self, place: str, value: Mapping[str, object], known: set[str]) -> None:
        for key in value:
            if key not in known:
                self._wrong(f"{place}.{key}", f"is unknown; known are {', '.join(sorted(known))}")

    def _wrong(self, place: str, problem: str) -> None:
        self.problems.append(f"{place.removeprefix('.')} {problem}".strip())


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)
