"""Cancellations that get lost in the NATS client.

The client waits by ``asyncio.wait_for``. Up to Python 3.11 that returns its result, and drops the cancellation of
whoever waits, when both come in the same turn of the event loop; and once its connection is closed the client turns a
cancellation into an error of its own. A task that was told to end would go on for ever, and whoever waits for its end
with it. So nothing of the client that waits for an answer is awaited without ``heed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def heed(waiting: Awaitable[T]) -> T:
    """Return, or raise, what comes of it; CancelledError if this task was cancelled meanwhile, whatever comes of it."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()  # a task that cleans up after a cancellation still counts it
    try:
        return await waiting
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
