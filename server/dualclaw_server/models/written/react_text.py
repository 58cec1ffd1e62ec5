"""Reads Thought / Action / Action Input / Observation / Final Answer out of a text while it is being written.

Rules and their reasons:

- A marker counts at the beginning of a line (up to three spaces before it) and outside of code fences; anywhere
  else it is something the model writes about. It may be bold, and its colon may be a full-width one.
- Held back is only what may still become a marker, and the white space before it: text is shown as it comes.
- Text before any marker is text of the answer; so a plain reply without markers *is* the answer. A thought is
  reasoning. After "Final Answer" everything is text to the end, markers too: answers quote them.
- An action ends where the next marker begins. Its input may be fenced, or stand right under the action. Without
  an input and with white space in its name it is a sentence ("Action: Bob will call"), and becomes text again.
  "None" where no tool has that name is no call.
- After an action an Observation, or a Final Answer, is imagined: nothing has run yet. It is cut off, with
  whatever follows. Before any action an Observation is text.
- Arguments are one JSON object, fenced or not, with prose after it or not. Nothing else is guessed: two objects,
  single quotes or bare words are given on as they are, and count as bad arguments.
- An answer that consists of a thought alone is given as text too: better twice than an empty answer.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dualclaw import ContentPart
from dualclaw.events import canonical_json
from dualclaw_server.engine.model import FinishReason, ReasoningDelta, TextDelta
from dualclaw_server.models.written.tool_text import WrittenCall, thought_part

Delta = TextDelta | ReasoningDelta


class _Marker(Enum):
    THOUGHT = ("Thought", "思考")
    ACTION = ("Action", "行动")
    INPUT = ("Action Input", "Action input", "行动输入")
    OBSERVATION = ("Observation", "观察")
    ANSWER = ("Final Answer", "Final answer", "最终答案")


class _Section(Enum):
    PLAIN = "text before any marker"
    THOUGHT = "a thought"
    ACTION = "the name of an action, and what stands under it"
    INPUT = "the input of an action"
    ANSWER = "the final answer"
    CUT = "imagined; nothing is read any more"


_FORMS: Mapping[str, _Marker] = {
    form: marker
    for marker in _Marker
    for name in marker.value
    for colon in ":："
    for form in (f"{name}{colon}", f"{name} {colon}", f"**{name}{colon}**", f"**{name}**{colon}")
}
_BEGINNINGS = frozenset(form[:length] for form in _FORMS for length in range(1, len(form)))
_LONGEST = max(map(len, _FORMS))
_FENCE = "```"
_BEGINNINGS_OF_FENCE = ("`", "``")
_WHITESPACE = " \t\r\n"
_DEEPEST_INDENT = 3
_MOST_WHITESPACE = 1000
_NO_ACTION = frozenset({"none", "n/a", "null", "no action", "无"})
_LENIENT = json.JSONDecoder(strict=False)  # a line break inside a string is wrong, and means nothing else


@dataclass(slots=True)
class _OpenAction:
    """An action that is being written. ``raw`` is all of its text, ``head`` what stands before its input."""

    before: _Section
    raw: list[str]
    head: list[str] = field(default_factory=list)
    input: list[str] | None = None
    named: bool = False
    """Its first line is over, and is a name."""


@dataclass(slots=True)
class _Run:
    kind: type[TextDelta] | type[ReasoningDelta]
    pieces: list[str] = field(default_factory=list)


_KINDS: Mapping[_Section, type[TextDelta] | type[ReasoningDelta]] = {
    _Section.PLAIN: TextDelta,
    _Section.ANSWER: TextDelta,
    _Section.THOUGHT: ReasoningDelta,
}
_SHOWN = (_Section.PLAIN, _Section.ANSWER)


class ReActReader:
    """Reads one message. ``feed`` pieces of text, ``add`` parts that are none, then ``end``.

    Args:
        tools: names that may be called; empty: no action is one, all of them are text.
        single: at most one call; a second action is cut off.
    """

    def __init__(self, tools: Collection[str], *, single: bool = False) -> None:
        self._tools = tools
        self._single = single
        self._section = _Section.PLAIN
        self._line_start = True
        self._fresh = False
        self._fenced = False
        self._gap = ""
        self._held = ""
        self._action: _OpenAction | None = None
        self._blocks: list[_Run | WrittenCall | ContentPart] = []
        self._pending: list[Delta] = []
        self._acted = False

    @property
    def cut(self) -> bool:
        """Everything that counts has been read."""
        return self._section is _Section.CUT

    def feed(self, piece: str) -> list[Delta]:
        """Take the next piece; return what is sure by then, neighbours of one kind merged."""
        text, self._held = self._held + piece, ""
        while text and self._section is not _Section.CUT:
            text = self._begin_line(text) if self._line_start else self._in_line(text)
        return self._take()

    def add(self, part: ContentPart) -> None:
        """Take a part that is no text; it keeps its place."""
        self._blocks.append(part)

    def end(self, finish: FinishReason) -> list[Delta]:
        """Give back what was held; the message is over. Where it was cut off, a thought alone is no answer."""
        if self._section is not _Section.CUT:
            held, self._held = self._held, ""
            if held or (self._section in _SHOWN and not self._fresh):
                self._say(self._leave_gap() + held)
            self._close_action()
        said = {block.kind for block in self._blocks if isinstance(block, _Run)}
        if finish == "stop" and not self._acted and TextDelta not in said and self._section is _Section.THOUGHT:
            # All runs are thoughts then; parts that are no text may stand between them.
            pieces = (piece for block in self._blocks if isinstance(block, _Run) for piece in block.pieces)
            self._give(TextDelta, "".join(pieces).strip())
        return self._take()

    def blocks(self) -> list[ContentPart | WrittenCall]:
        """Return what the message holds, in order."""
        return [_part(block) if isinstance(block, _Run) else block for block in self._blocks]

    def _begin_line(self, text: str) -> str:
        """Take the beginning of a line, or of what follows a marker; returns what is left to read."""
        bare = text.lstrip(_WHITESPACE)
        self._gap += text[: len(text) - len(bare)]
        if not bare:
            if len(self._gap) > _MOST_WHITESPACE:
                self._say(self._leave_gap())
            return ""
        if bare in _BEGINNINGS_OF_FENCE:
            self._held = bare
            return ""
        if bare.startswith(_FENCE):
            self._fenced = not self._fenced
        elif not self._fenced and self._may_mark():
            found = next((bare[:size] for size in range(1, _LONGEST + 1) if bare[:size] in _FORMS), None)
            if found is not None:
                self._mark(_FORMS[found], found)
                return bare[len(found) :]
            if bare in _BEGINNINGS:
                self._held = bare
                return ""
        self._say(self._leave_gap())
        self._line_start = False
        return bare

    def _may_mark(self) -> bool:
        """Return whether a marker could stand here: not in the line of another one, not deeply indented."""
        if self._section is _Section.ANSWER:
            return False
        indent = len(self._gap) - self._gap.rfind("\n") - 1
        return indent <= _DEEPEST_INDENT and not (self._fresh and "\n" not in self._gap)

    def _in_line(self, text: str) -> str:
        end = -1 if self._section is _Section.ANSWER else text.find("\n")
        if end < 0:
            self._say(text)
            return ""
        self._say(text[:end])
        self._line_start = True
        return text[end:]

    def _mark(self, marker: _Marker, literal: str) -> None:
        """Act on a marker; where it means nothing it is text."""
        if marker is _Marker.INPUT and self._action is not None and self._section is _Section.ACTION:
            self._action.raw.append(self._gap + literal)
            self._action.input = []
            self._enter(_Section.INPUT)
            return
        if marker is not _Marker.INPUT:
            self._close_action()
        imagined = marker in (_Marker.OBSERVATION, _Marker.ANSWER) or (marker is _Marker.ACTION and self._single)
        if self._acted and imagined:
            self._section = _Section.CUT
        elif marker is _Marker.THOUGHT:
            self._enter(_Section.THOUGHT)
        elif marker is _Marker.ANSWER:
            self._enter(_Section.ANSWER)
        elif marker is _Marker.ACTION and self._tools:
            self._action = _OpenAction(self._section, [self._gap + literal])
            self._enter(_Section.ACTION)
        else:
            self._say(self._leave_gap() + literal)
            self._line_start = False

    def _enter(self, section: _Section) -> None:
        self._section = section
        self._gap = ""
        self._line_start = self._fresh = True

    def _leave_gap(self) -> str:
        """Return the white space that was held: none where it only parts a marker from its text."""
        gap, self._gap = self._gap, ""
        if self._fresh:
            self._fresh = False
            if self._action is not None:
                self._action.raw.append(gap)
            return self._parting()
        return gap

    def _parting(self) -> str:
        """Return what keeps a thought, or an answer, from the one before it."""
        kind = _KINDS.get(self._section)
        if kind is None or not any(isinstance(block, _Run) and block.kind is kind for block in self._blocks):
            return ""
        return "\n\n" if kind is TextDelta else "\n"

    def _say(self, text: str) -> None:
        if not text:
            return
        action = self._action
        if action is None:
            self._give(_KINDS[self._section], text)
            return
        action.raw.append(text)
        if action.input is not None:
            action.input.append(text)
            return
        action.head.append(text)
        if not action.named and "\n" in text:
            action.named = self._is_name("".join(action.head))
            if not action.named:
                self._close_action()

    def _give(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        if not text:
            return
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Run) or last.kind is not kind:
            last = _Run(kind)
            self._blocks.append(last)
        last.pieces.append(text)
        self._pending.append(kind(text))

    def _is_name(self, head: str) -> bool:
        name = _name(head)
        return len(name.split()) < 2 or name in self._tools or name.lower() in _NO_ACTION

    def _close_action(self) -> None:
        """End the open action: it is a call, or none, or was text all along."""
        action, self._action = self._action, None
        if action is None:
            return
        head = "".join(action.head)
        if action.input is None and not self._is_name(head):
            self._section = action.before
            self._give(_KINDS[self._section], "".join(action.raw))
            return
        name = _name(head)
        below = head.partition("\n")[2] if action.input is None else "".join(action.input)
        empty = not name and (action.input is None or not below.strip())
        if name not in self._tools and (name.lower() in _NO_ACTION or empty):
            self._section = action.before
            return
        self._blocks.append(WrittenCall(name, read_arguments(below)))
        self._section = action.before
        self._acted = True

    def _take(self) -> list[Delta]:
        found, self._pending = self._pending, []
        merged: list[Delta] = []
        for delta in found:
            if merged and type(merged[-1]) is type(delta):
                merged[-1] = type(delta)(merged[-1].text + delta.text)
            else:
                merged.append(delta)
        return merged


def read_arguments(text: str) -> str:
    """Return the one JSON object a text holds as canonical JSON, or the text as it is."""
    body = text.strip()
    if body.startswith(_FENCE):
        body = (body.partition("\n")[2] if "\n" in body else body.strip("`")).lstrip()
    if not body.startswith("{"):
        return text
    try:
        value, end = _LENIENT.raw_decode(body)
        return text if body[end:].lstrip().startswith("{") else canonical_json(value)
    except (ValueError, RecursionError):
        return text


def _name(head: str) -> str:
    return head.partition("\n")[0].strip().strip("*`\"'").strip()


def _part(run: _Run) -> ContentPart:
    text = "".join(run.pieces)
    return ContentPart(text=text) if run.kind is TextDelta else thought_part(text)
