"""The one assembler of tool calls: fragments of any vendor in, whole calls out.

A fragment is ``(index, id, name, arguments)``; each may be missing. Which call a fragment belongs to:

| id | index | name | belongs to |
| --- | --- | --- | --- |
| known | any | none, or that call's | that call; a wrong index does not matter |
| known | any | given, and that call is complete | another one (re-keyed) if its name or arguments differ |
| new | known | none | the call at the index: its late id, or a changed one (the first stays) |
| new | known | none, and that call is complete, and arguments come | another call, whose name comes later |
| new | known | given | the call at the index while it may still be meant (below); else another call |
| new | new | any | another call |
| new | none | none | the current call while that has no id; else another call |
| new | none | given | the current call while it may still be meant; else another call |
| none | known | none, or a call not complete | the call at the index |
| none | known | given, and that call is complete | another one if its name or arguments differ |
| none | new | none | the call opened last (a tail with a wrong index); without one, another call |
| none | new | given | another call |
| none | none | none | the current call; without one, another call |
| none | none | given | the current call while nameless, or of that name and not complete; else another |

An empty id is no id. *Complete* means that the call has a name and its arguments are one JSON object. The
*current* call is the one the last fragment belonged to. A call *may still be meant* by a head with a new id
while it has no id, is not complete, and has no name or the same one. A fragment with nothing in it
(``function: null``) is ignored.

What a fragment does to its call:

- The name: the first wins; a repeat changes nothing; pieces of one name (no arguments yet) are joined, and a
  name that grows (``get``, ``get_time``) replaces its shorter form.
- The arguments are joined and parsed once, at the end. Sent again whole after they were complete they count
  once. ``{}`` sent first as a placeholder gives way to a later text that starts with ``{``.

What comes out, in order of first appearance:

- Missing, null, blank or "null" arguments are ``{}``; but when the vendor says the answer was cut off, the
  last call's empty arguments may be missing their text, so they count as bad.
- Text that is not one JSON object is *bad*: the call has no args_json, the raw text stands in
  ``bad_arguments``, and nobody may run it. So half an argument string is never executed, whatever the finish
  reason says.
- A missing id becomes ``call_`` and 32 hex digits; so does an id used twice, or in the conversation before.
- A call without a name is an error; as the last one of an answer that was cut off it is left out.
"""

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

from dualclaw import ToolCall
from dualclaw.events import clean_text, parse_args
from dualclaw.json_text import canonical_args_of

_PLAIN = re.compile(r'[^"\\]+')
_STRUCTURE = re.compile(r'["{}\[\]]')
_LARGEST_INDEX_DIGITS = 9


class NamelessCallError(ValueError):
    """The stream ended and a call never got its name."""


class _Ending:
    """Follows a JSON text as it grows, to know in time that is linear over all of it whether it may be one object.

    Vendors that repeat a call's name in every fragment make us ask whether the call is complete at each of them.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._over = False
        self._spoilt = False

    @property
    def reached(self) -> bool:
        """What began with ``{`` has come to its end, and nothing follows."""
        return self._over and not self._spoilt

    def feed(self, piece: str) -> None:
        """Take what was added."""
        at = 0
        while at < len(piece) and not self._spoilt:
            at = self._string(piece, at) if self._in_string else self._outside(piece, at)

    def _string(self, piece: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if (run := _PLAIN.match(piece, at)) is not None:
            return run.end()
        self._escaped = piece[at] == "\\"
        self._in_string = self._escaped
        return at + 1

    def _outside(self, piece: str, at: int) -> int:
        if not self._depth:
            rest = piece[at:].lstrip()
            begins = rest.startswith("{") and not self._over
            self._spoilt = bool(rest) and not begins
            self._depth = int(begins)
            return len(piece) - len(rest) + 1 if begins else len(piece)
        found = _STRUCTURE.search(piece, at)
        if found is None:
            return len(piece)
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self._over = self._depth == 0
        return found.end()


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that is being streamed."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    size: int = 0
    _ending: _Ending = field(default_factory=_Ending)
    _followed: int = 0
    """How many of the pieces ``_ending`` has seen."""
    _is_object: bool | None = None
    """Whether the text so far is one JSON object; None: not looked at since it grew."""

    def arguments(self) -> str:
        """Return the text so far."""
        if len(self.pieces) > 1:
            self._follow()
            self.pieces = ["".join(self.pieces)]
            self._followed = 1
        return self.pieces[0] if self.pieces else ""

    def add(self, arguments: str) -> None:
        """Add a fragment of the arguments."""
        if arguments:
            self.pieces.append(arguments)
            self.size += len(arguments)

    def replace(self, arguments: str) -> None:
        """Take the whole arguments instead of what came so far."""
        self.pieces, self.size = [arguments], len(arguments)
        self._ending, self._followed, self._is_object = _Ending(), 0, None

    def complete(self) -> bool:
        """Return whether it has a name and its arguments are one JSON object."""
        if not self.name:
            return False
        self._follow()
        if self._is_object is None:
            self._is_object = self._ending.reached and read_object(self.arguments()) is not None
        return self._is_object

    def _follow(self) -> None:
        for piece in self.pieces[self._followed :]:
            self._ending.feed(piece)
            self._is_object = None
        self._followed = len(self.pieces)


@dataclass(frozen=True, slots=True)
class AssembledCall:
    """A whole call. ``bad_arguments`` is the raw text if it is not one JSON object, else None."""

    call: ToolCall
    bad_arguments: str | None
    source: OpenCall


def read_index(value: object) -> int | None:
    """Return a place as vendors give it, a number or its digits; None: it is no place."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _LARGEST_INDEX_DIGITS:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_object(text: str) -> dict[str, object] | None:
    """Return the JSON object that the text is, or None if it is anything else."""
    found = parse_args(text)
    if found:
        return found
    try:
        return {} if json.loads(text) == {} else None
    except (ValueError, RecursionError):
        return None


class ToolCallAssembler:
    """Assembles the calls of one model message by the table above.

    Args:
        taken: call ids of the conversation before; a vendor that counts from 0 again is re-keyed.
    """

    def __init__(self, taken: Collection[str] = frozenset()) -> None:
        self._taken = taken
        self._calls: list[OpenCall] = []
        self._by_id: dict[str, OpenCall] = {}
        self._by_index: dict[int, OpenCall] = {}
        self._current: OpenCall | None = None

    def feed(
        self, *, index: int | None = None, call_id: str = "", name: str = "", arguments: str = ""
    ) -> OpenCall | None:
        """Take one fragment. Returns the call if the fragment opened it, else None."""
        if not (call_id or name or arguments):
            return None
        call = self._route(index, call_id, name, arguments)
        opened = call is None
        if call is None:
            call = OpenCall()
            self._calls.append(call)
        if index is not None and (opened or index not in self._by_index):
            self._by_index[index] = call
        if call_id:
            call.id = call.id or call_id
            self._by_id[call_id] = call
        self._current = call
        if name:
            _set_name(call, name)
        if arguments:
            _add_arguments(call, arguments)
        return call if opened else None

    def finish(self, *, truncated: bool = False) -> list[AssembledCall]:
        """Return the calls, in order of first appearance.

        Args:
            truncated: the vendor says the answer was cut off.

        Raises:
            NamelessCallError: a call never got a name.
        """
        calls = list(self._calls)
        if truncated and calls and not calls[-1].name:
            calls.pop()
        used: set[str] = set()
        done: list[AssembledCall] = []
        for call in calls:
            if not call.name:
                raise NamelessCallError("a tool call has no name")
            call_id = clean_text(call.id)
            if not call_id or call_id in used or call_id in self._taken:
                call_id = f"call_{uuid.uuid4().hex}"
            used.add(call_id)
            cut = truncated and call is calls[-1]
            args_json, bad = _read_arguments(call.arguments(), cut=cut)
            made = ToolCall(id=call_id, name=clean_text(call.name), args_json=args_json)
            done.append(AssembledCall(made, bad, call))
        return done

    def open(self) -> OpenCall:
        """Open a call whatever came before, for APIs that say themselves which call a fragment belongs to."""
        call = OpenCall()
        self._calls.append(call)
        self._current = call
        return call

    @property
    def current(self) -> OpenCall | None:
        """The call the last fragment belonged to."""
        return self._current

    def __len__(self) -> int:
        return len(self._calls)

    def _route(self, index: int | None, call_id: str, name: str, arguments: str) -> OpenCall | None:
        """Return the call a fragment belongs to, or None for another one: the table's rows, top to bottom."""
        at_index = None if index is None else self._by_index.get(index)
        current = self._current
        if call_id:
            known = self._by_id.get(call_id)
            if known is not None:
                return None if name and _is_other(known, name, arguments) else known
            if index is not None:
                if at_index is None:
                    return None
                if not name:
                    fresh = bool(arguments.strip()) and at_index.complete()
                    return None if fresh else at_index
                return at_index if _may_be_meant(at_index, name) else None
            if current is None or current.id or (name and not _may_be_meant(current, name)):
                return None
            return current
        if index is not None:
            if at_index is not None:
                return None if name and _is_other(at_index, name, arguments) else at_index
            return None if name or not self._calls else self._calls[-1]
        if current is None or not name or not current.name:
            return current
        return current if name == current.name and not current.complete() else None


def _may_be_meant(call: OpenCall, name: str) -> bool:
    return not call.id and call.name in ("", name) and not call.complete()


def _is_other(known: OpenCall, name: str, arguments: str) -> bool:
    """Return whether a fragment with this call's id or index, and a name, is the head of another call."""
    if not known.complete():
        return False
    if known.name != name:
        return True
    return bool(arguments.strip()) and not _is_repeat(known, arguments) and known.arguments() != "{}"


def _is_repeat(call: OpenCall, arguments: str) -> bool:
    return len(arguments) == call.size and arguments == call.arguments() and read_object(arguments) is not None


def _set_name(call: OpenCall, name: str) -> None:
    if not call.name or name.startswith(call.name):
        call.name = name
    elif not call.size and name != call.name:
        call.name += name


def _add_arguments(call: OpenCall, arguments: str) -> None:
    if _is_repeat(call, arguments):
        return
    if call.size == 2 and call.arguments() == "{}" and arguments.lstrip().startswith("{"):
        call.replace(arguments)
    else:
        call.add(arguments)


def _read_arguments(text: str, *, cut: bool) -> tuple[str, str | None]:
    """Return (args_json, None), or ("", the raw text) when it is not one JSON object."""
    if text.strip() in ("", "null"):
        return ("", clean_text(text)) if cut else ("{}", None)
    canonical = canonical_args_of(text)
    if canonical:
        return canonical, None
    return ("", clean_text(text)) if read_object(text) is None else ("{}", None)
