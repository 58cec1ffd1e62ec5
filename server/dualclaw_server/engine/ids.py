"""Ids: UUIDv7 (RFC 9562), so that ids made later sort later."""

import os
import time
from collections.abc import Callable
from typing import Final

_random: Final[Callable[[int], bytes]] = getattr(os, "getrandom", os.urandom)
"""Both ask the operating system; ``urandom`` lets go of the interpreter meanwhile, and getting it back takes long."""
_LAYOUT: Final = (0x7 << 76) | (0x2 << 62)
"""Version and variant."""
_FREE: Final = ~((0xF << 76) | (0x3 << 62))


def _new_hex() -> str:
    """Return a new UUIDv7 as 32 hex digits: 48 bits of Unix milliseconds, then 74 random bits."""
    stamp = time.time_ns() // 1_000_000
    return f"{((stamp << 80) | int.from_bytes(_random(10), 'big')) & _FREE | _LAYOUT:032x}"


def new_id() -> str:
    """Return a new UUIDv7 in its usual text form."""
    digits = _new_hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def new_trace_id() -> str:
    """Return a new W3C trace id: 32 hex digits, not all zero."""
    return _new_hex()
