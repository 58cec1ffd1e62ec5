"""Values kept as JSON text inside a checkpoint: what cannot be saved is refused when it is set, not later."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

import msgspec

from dualclaw.events import canonical_json

T = TypeVar("T")

MAX_VALUE = 256 * 1024
"""Characters of one value's JSON text."""
MAX_ALL = 4 * 1024 * 1024
"""Characters of all values of a run together, and of all extras of an agent: every save writes them."""


class Values:
    """Named JSON values. A set value is a copy: changing the object afterwards changes nothing here."""

    def __init__(self, texts: MutableMapping[str, str], prefix: str = "") -> None:
        """``texts`` holds the JSON texts; names here are those keys that begin with ``prefix``, without it."""
        self._texts = texts
        self._prefix = prefix

    def get(self, name: str, default: object = None) -> object:
        """Return a value as plain JSON data."""
        text = self._texts.get(self._prefix + name)
        return default if text is None else json.loads(text)

    def get_as(self, name: str, kind: type[T], default: T) -> T:
        """Return a value as a type: any that msgspec can convert to (dataclasses, TypedDict, lists of them).

        Raises:
            TypeError: what is stored does not fit the type; the text says where.
        """
        text = self._texts.get(self._prefix + name)
        if text is None:
            return default
        try:
            return msgspec.convert(json.loads(text), kind)
        except msgspec.ValidationError as error:
            raise TypeError(f"value {name!r} is no {getattr(kind, '__name__', kind)}: {error}") from None

    def set(self, name: str, value: object) -> None:
        """Store a value.

        Raises:
            TypeError: it is no JSON and nothing that converts to it, or has a number JSON lacks; nothing is changed.
            ValueError: the name is empty, or the value, or all of them together, too large.
        """
        if not name:
            raise ValueError("a value needs a name")
        try:
            plain = msgspec.to_builtins(value, str_keys=True)
            json.dumps(plain, allow_nan=False)  # would become null
            text = canonical_json(plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"value {name!r} cannot be saved: {error}") from None
        if len(text) > MAX_VALUE:
            raise ValueError(f"value {name!r} has {len(text)} characters of JSON, at most {MAX_VALUE} can be saved")
        key = self._prefix + name
        size = len(key) + len(text) + sum(len(k) + len(v) for k, v in self._texts.items() if k != key)
        if size > MAX_ALL:
            raise ValueError(f"with value {name!r} there would be {size} characters kept, at most {MAX_ALL} can be")
        self._texts[key] = text

    def delete(self, name: str) -> None:
        """Forget a value; unknown is fine."""
        self._texts.pop(self._prefix + name, None)

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._texts

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in list(self._texts) if name.startswith(self._prefix))
