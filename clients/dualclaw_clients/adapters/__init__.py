"""Adapters: from engine events to what a channel speaks. Nothing else in a claw writes the wire format."""

from dualclaw_clients.adapters.base import BaseClawAdapter
from dualclaw_clients.adapters.buffer import BufferAdapter
from dualclaw_clients.adapters.frames import HEARTBEAT, Wire, native_frame, original_frame
from dualclaw_clients.adapters.media import MediaContent
from dualclaw_clients.adapters.questions import ANSWER_WORDS
from dualclaw_clients.adapters.sse import NativeSseAdapter, SseAdapter

__all__ = [
    "ANSWER_WORDS",
    "HEARTBEAT",
    "BaseClawAdapter",
    "BufferAdapter",
    "MediaContent",
    "NativeSseAdapter",
    "SseAdapter",
    "Wire",
    "native_frame",
    "original_frame",
]
