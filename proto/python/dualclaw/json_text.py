"""Text and JSON that are safe to cross the wire: the canonical args_json form and its never-failing reader.

Rules and their reasons:

- Arguments travel as JSON text and not as ``google.protobuf.Struct``, which turns every integer into a
  double. The canonical form is what ``json.dumps(obj, ensure_ascii=False)`` prints, so that writers in other
  languages copy it verbatim and all languages put the same bytes on the wire.
- Models and foreign producers write anything: lone surrogates, NaN, integers of a million digits, a
  thousand opening brackets. None of it may raise where a stream is being read, so the reader has a value for
  everything: ``{}`` or null.
- Nesting is bounded by looking at the text before it is parsed, and walked with an own stack, because the
  interpreter's recursion limit depends on who calls.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping

MAX_DEPTH = 100
"""Objects and lists within each other that a reader accepts; the outermost object counts as one."""
MAX_DIGITS = 4_000
"""Digits of a number that a reader accepts; Python itself prints integers of up to 4,300."""

_encode = json.JSONEncoder(ensure_ascii=False).encode
_HUGE = 10**MAX_DIGITS
_HUGE_BITS = _HUGE.bit_length()
# Possessive, so that an unclosed quote costs one pass; the lone quote is what such a text leaves over.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

_Iterators = list[tuple[Iterator[tuple[object, object]], dict[str, object] | list[object], int]]


def clean_text(text: str) -> str:
    """Return the text without lone surrogates: each becomes U+FFFD, the two halves of a pair one character."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def canonical_json(obj: object) -> str:
    """Return the canonical JSON text of a value of any depth.

    Lone surrogates become U+FFFD; NaN, infinities and integers of more than 4,000 digits become null; of
    keys that are the same once they are text the last wins.

    Raises:
        ValueError: it holds something JSON has no form for (the type is named), or contains itself.
    """
    tree, depth = _plain(obj, strict=True)
    if depth <= MAX_DEPTH:
        return _encode(tree)
    return "".join(_print(tree))


def canonical_args(args: Mapping[str, object]) -> str:
    """Return the args_json of an object: empty for ``{}``, and for one that readers would take for ``{}``.

    Raises:
        ValueError: as ``canonical_json``.
    """
    tree, depth = _plain(args, strict=True)
    return _encode(tree) if tree and depth <= MAX_DEPTH else ""


def canonical_args_of(text: str) -> str:
    """Return the canonical form of an args_json text, as ``canonical_args`` of what ``parse_args`` reads; never raises.

    Empty for text that is not one JSON object, as for ``{}``.
    """
    found = parse_args(text)
    return _encode(found) if found else ""  # it holds clean values only, and is not too deep


def lenient_args(args: object) -> str:
    """Return the args_json of whatever a producer sent; never raises: not an object is empty, a wrong value null."""
    if not isinstance(args, dict):
        return ""
    tree, depth = _plain(args, strict=False)
    return _encode(tree) if tree and depth <= MAX_DEPTH else ""


def parse_args(text: str) -> dict[str, object]:
    """Return the object that an args_json text stands for; never raises.

    Empty text, text that is not one JSON object, or one nested deeper than 100, is ``{}``. A number of more
    than 4,000 digits or beyond a double's range is None, as are NaN and Infinity; integers are exact; of
    duplicate keys the last wins; lone surrogates become U+FFFD.
    """
    if not text:
        return {}
    text = clean_text(text)
    if text.count("{") + text.count("[") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        return {}
    try:
        found = _decode(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    if _SURROGATE_ESCAPE.search(text):
        found = _plain(found, strict=False)[0]
    return found if isinstance(found, dict) else {}


def _read_int(literal: str) -> int | None:
    return int(literal) if len(literal) <= MAX_DIGITS or len(literal.lstrip("-")) <= MAX_DIGITS else None


def _read_float(literal: str) -> float | None:
    if len(literal) > MAX_DIGITS and sum(c.isdigit() for c in literal) > MAX_DIGITS:
        return None
    number = float(literal)
    return number if math.isfinite(number) else None


_decode = json.JSONDecoder(parse_int=_read_int, parse_float=_read_float, parse_constant=lambda _: None).decode


def _depth(text: str) -> int:
    """Deepest nesting of a JSON text; of a text that is not JSON, any number."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        part = match.group()
        if part in ("{", "["):
            depth += 1
            deepest = max(deepest, depth)
        elif part in ("}", "]"):
            depth -= 1
        elif part == '"':
            break
    return deepest


def _plain(root: object, *, strict: bool) -> tuple[object, int]:
    """Return a copy made of clean JSON values only, and its depth.

    Unless strict, what has no JSON form becomes null and the walk stops one level below the deepest that
    readers accept, which also ends a value that contains itself.
    """
    top: list[object] = []
    stack: _Iterators = [(iter([(0, root)]), top, 0)]
    path: set[int] = set()
    deepest = 0
    while stack:
        items, target, identity = stack[-1]
        step = next(items, None)
        if step is None:
            stack.pop()
            path.discard(identity)
            continue
        key, value = step
        child: dict[str, object] | list[object] | None = None
        copied: object
        if isinstance(value, Mapping):
            child, inner = {}, iter(list(value.items()))
        elif isinstance(value, list | tuple):
            child, inner = [], enumerate(list(value))
        if child is not None:
            if id(value) in path and strict:
                raise ValueError("a value that contains itself has no JSON form")
            copied = child
        else:
            copied = _scalar(value, strict=strict)
        if isinstance(target, list):
            target.append(copied)
        else:
            name = _key(key, strict=strict)
            if name is None:
                continue
            target[name] = copied
        if child is not None:
            deepest = max(deepest, len(stack))
            if not strict and deepest > MAX_DEPTH:
                break
            path.add(id(value))
            stack.append((inner, child, id(value)))
    return top[0], deepest


def _scalar(value: object, *, strict: bool) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, int):
        return None if value.bit_length() >= _HUGE_BITS and abs(value) >= _HUGE else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if strict:
        raise ValueError(f"a value of type {type(value).__name__} has no JSON form")
    return None


def _key(key: object, *, strict: bool) -> str | None:
    if isinstance(key, str):
        return clean_text(key)
    if isinstance(key, bool | int | float) or key is None:
        plain = _scalar(key, strict=strict)
        return json.dumps(plain)
    if strict:
        raise ValueError(f"a key of type {type(key).__name__} has no JSON form")
    return None


def _print(root: object) -> Iterator[str]:
    """Yield the text of a clean tree piece by piece, with an own stack instead of recursion."""
    stack: list[tuple[Iterator[tuple[str, object]], str]] = [(iter([("", root)]), "")]
    first = True
    while stack:
        items, closing = stack[-1]
        step = next(items, None)
        if step is None:
            stack.pop()
            yield closing
            first = False
            continue
        prefix, value = step
        yield prefix if first else ", " + prefix
        first = False
        if isinstance(value, dict):
            yield "{"
            stack.append((((_encode(k) + ": ", v) for k, v in value.items()), "}"))
            first = True
        elif isinstance(value, list):
            yield "["
            stack.append(((("", v) for v in value), "]"))
            first = True
        else:
            yield _encode(value)
