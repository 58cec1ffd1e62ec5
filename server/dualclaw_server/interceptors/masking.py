r"""Masking: credentials out of text, of texts that belong together, of JSON data, and of log records.

How a text is masked

1. Rules search the text as it is, and as it reads once JSON escapes are undone, up to three times: JSON within
   JSON hides a key behind ``\u0073k`` or a password behind ``\"``. What is found there is traced back.
2. Overlapping finds are one; each becomes ``[masked:id]``, which no rule finds again.
3. That is repeated until nothing is found, since a neighbour that is gone can leave a border that makes a
   credential of what is left. So masking what is masked changes nothing.

Texts of one result are searched joined as well, for a credential may be split over them; the marker stands where
it began. The time is linear in the text: see the rules.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dualclaw_server.interceptors.secret_names import STRONG, secret_name
from dualclaw_server.interceptors.secrets import RULES, Rule

MAX_DEPTH = 100
"""Objects and lists within each other that are looked into; what is deeper is masked whole."""
_LEVELS = 3
_ROUNDS = 8
_CACHE, _CACHED = 128, 32_768
"""Clean texts that are remembered, and the length of the longest."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([\"\\/bfnrt]))")
_MEANING = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NESTED = re.compile(rf"(?i:{STRONG})s?\d{{0,2}}\"\s{{0,8}}:\s{{0,8}}[\[{{]")


@dataclass(frozen=True, slots=True)
class _Find:
    start: int
    end: int
    rule: str


@dataclass(frozen=True, slots=True)
class _View:
    """A text as it reads without escapes, and where its characters stand in the text."""

    text: str
    here: list[int] = field(default_factory=list)
    """Places after each undone escape."""
    there: list[int] = field(default_factory=list)
    """The same places in the text."""

    def trace(self, place: int) -> int:
        """Return the place in the text."""
        last = bisect_right(self.here, place) - 1
        return place if last < 0 else self.there[last] + place - self.here[last]


class Masker:
    """Takes credentials out of whatever may be shown. A pure function of its rules, and of nothing it saw before."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = tuple(rules)
        self._clean: OrderedDict[str, None] = OrderedDict()  # texts known to hold nothing: most are asked for twice

    def text(self, text: str) -> str:
        """Return a text with every credential masked."""
        if text in self._clean:
            return text
        text = self._nested(text)
        for _ in range(_ROUNDS):
            found = self._search(text)
            if not found:
                self._remember(text)
                break
            text = _replace([text], found)[0]
        return text

    def _remember(self, text: str) -> None:
        if len(text) <= _CACHED:
            self._clean[text] = None
        if len(self._clean) > _CACHE:
            self._clean.popitem(last=False)

    def texts(self, texts: Sequence[str]) -> list[str]:
        """Return texts that follow each other, masked also where a credential is split over them."""
        masked = list(texts)
        for _ in range(_ROUNDS):
            before = masked
            if len(masked) > 1:
                masked = _replace(masked, self._search("".join(masked)))
            masked = [self.text(text) for text in masked]
            if masked == before or len(masked) <= 1:
                break
        return masked

    def tree(self, value: object) -> object:
        """Return JSON data masked: texts, and whole whatever stands under a name such as "password"."""
        return self._tree(value, 0)

    def _tree(self, value: object, depth: int) -> object:
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth >= MAX_DEPTH:
            return marker("too-deep")
        if isinstance(value, Mapping):
            return self._object(value, depth)
        if isinstance(value, list | tuple):
            return self._list(value, depth)
        return marker("no-json")

    def _object(self, value: Mapping[object, object], depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        named = next((value[key] for key in ("name", "key") if isinstance(value.get(key), str)), "")
        for key, item in value.items():
            told = str(key)
            name = base = self.text(told)
            count = 1
            while name in made:
                count += 1
                name = f"{base} ({count})"
            by_pair = told.lower() == "value" and isinstance(named, str) and secret_name(named)
            made[name] = (
                marker("secret") if (secret_name(told) or by_pair) and _hides(item) else self._tree(item, depth + 1)
            )
        return made

    def _list(self, value: Sequence[object], depth: int) -> list[object]:
        made: list[object] = []
        flag = False
        for item in value:
            text = isinstance(item, str)
            made.append(marker("secret") if flag and text and _hides(item) else self._tree(item, depth + 1))
            flag = isinstance(item, str) and item.startswith("-") and "=" not in item and bool(secret_name(item))
        return made

    def _nested(self, text: str) -> str:
        """Mask lists and objects that stand under a telling name of a JSON text."""
        if text[:1] not in ("{", "[") or not _NESTED.search(text):
            return text
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return text
        masked = self.tree(data)
        return text if masked == data else json.dumps(masked, ensure_ascii=False)

    def _search(self, text: str) -> list[_Find]:
        """Return what is to be masked, in order and without overlaps."""
        found = self._apply(text)
        trace: list[_View] = []
        view = text
        for _ in range(_LEVELS):
            inner = _unescaped(view)
            if inner is None:
                break
            trace.insert(0, inner)
            view = inner.text
            for find in self._apply(view):
                start, end = find.start, find.end
                for step in trace:
                    start, end = step.trace(start), step.trace(end)
                found.append(_Find(start, end, find.rule))
        found.sort(key=lambda find: (find.start, -find.end))
        merged: list[_Find] = []
        for find in found:
            if merged and find.start < merged[-1].end:
                last = merged[-1]
                merged[-1] = _Find(last.start, max(last.end, find.end), last.rule)
            else:
                merged.append(find)
        return [find for find in merged if text[find.start : find.end] != marker(find.rule)]

    def _apply(self, text: str) -> list[_Find]:
        lowered = text.lower()
        found: list[_Find] = []
        for rule in self._rules:
            if rule.hints and not any(hint in lowered for hint in rule.hints):
                continue
            group: str | int = "secret" if "secret" in rule.pattern.groupindex else 0
            matches = rule.pattern.finditer(text)
            found += (_Find(*match.span(group), rule.id) for match in matches if not rule.check or rule.check(match))
        return found


class MaskingFilter(logging.Filter):
    """Masks log records, their tracebacks and their extra texts, before a handler writes them."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        super().__init__()
        self._mask = mask

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record in place and let it pass; a record whose text cannot be made says so instead."""
        try:
            message = record.getMessage()
        except Exception as error:
            message = f"{record.msg!r} (its arguments do not fit: {type(error).__name__})"
        record.msg, record.args = self._mask(message), None
        if record.exc_info and record.exc_info[1] is not None:
            text = "".join(traceback.format_exception(*record.exc_info))
            masked = self._mask(text)
            if masked != text:  # formatters print the exception of exc_info, so that has to be another one
                record.exc_info = (MaskedTraceback, MaskedTraceback(masked), None)
                record.exc_text = None
        if record.exc_text:
            record.exc_text = self._mask(record.exc_text)
        if record.stack_info:
            record.stack_info = self._mask(record.stack_info)
        for name, value in list(record.__dict__.items()):
            if isinstance(value, str) and name not in _OF_EVERY_RECORD:
                record.__dict__[name] = self._mask(value)
        return True


class MaskedTraceback(Exception):
    """Stands for an exception whose text or whose code's lines held a credential; its text is the whole traceback."""


_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({})))


def marker(rule: str) -> str:
    """Return what stands for a masked credential."""
    return f"[masked:{rule}]"


def _hides(value: object) -> bool:
    """Say whether a value can be a credential: not for null, true, false and empty ones."""
    return value is not None and not isinstance(value, bool) and value not in ("", [], {})


def _unescaped(text: str) -> _View | None:
    """Return the text with one level of JSON escapes undone; None: there are none."""
    if "\\" not in text:
        return None
    pieces: list[str] = []
    here: list[int] = []
    there: list[int] = []
    length = last = 0
    for match in _ESCAPE.finditer(text):
        pieces += (text[last : match.start()], chr(int(match[1], 16)) if match[1] else _MEANING.get(match[2], match[2]))
        length += match.start() - last + 1
        last = match.end()
        here.append(length)
        there.append(last)
    if not here:
        return None
    pieces.append(text[last:])
    return _View("".join(pieces), here, there)


def _replace(texts: Sequence[str], finds: Sequence[_Find]) -> list[str]:
    """Put markers for finds, whose places count over all texts; one that spans texts stands where it begins."""
    made: list[str] = []
    pieces: list[str]
    offset = index = 0
    for text in texts:
        end, pieces, place = offset + len(text), [], offset
        while index < len(finds) and finds[index].start < end:
            find = finds[index]
            if find.start >= offset:
                pieces += (text[place - offset : find.start - offset], marker(find.rule))
            place = max(place, min(find.end, end))
            if find.end > end:
                break
            index += 1
        pieces.append(text[place - offset :])
        made.append("".join(pieces))
        offset = end
    return made
