"""Ids: UUIDv7 (RFC 9562), so that ids made later sort later."""

import os
import time
import uuid


def new_id() -> str:
    """Return a new UUIDv7 in its usual text form: 48 bits of Unix milliseconds, then 74 random bits."""
    stamp = time.time_ns() // 1_000_000
    value = (stamp << 80) | int.from_bytes(os.urandom(10), "big")
    value = (value & ~(0xF << 76)) | (0x7 << 76)
    value = (value & ~(0x3 << 62)) | (0x2 << 62)
    return str(uuid.UUID(int=value))


def new_trace_id() -> str:
    """Return a new W3C trace id: 32 hex digits, not all zero."""
    return uuid.UUID(new_id()).hex
