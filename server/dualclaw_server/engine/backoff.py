"""How long a run that cannot be worked on now is left alone: longer every time, and not for ever.

Counted in this process only: whoever has just started tries at once, for it may be what was missing.
"""

from __future__ import annotations

from dualclaw_server.engine.store import RunKey

FIRST = 5.0
"""Seconds the first time; twice as long each time after it."""
MOST = 300.0
"""Seconds at most."""
MISSING_MOST = 60.0
"""Seconds at most while only the run's agent is missing, which any process may bring at any time."""
_REMEMBERED = 10_000
"""Runs whose failures are counted; of more, the one that failed longest ago begins anew."""


class Backoff:
    """Counts the failures of each run. ``first`` and ``most`` in seconds."""

    def __init__(self, first: float = FIRST, most: float = MOST) -> None:
        self._first = first
        self._most = most
        self._failures: dict[RunKey, int] = {}

    def delay(self, key: RunKey, most: float = MOST) -> float:
        """Count a failure of a run and return the seconds until it is to be tried again."""
        before = self._failures.pop(key, 0)
        self._failures[key] = before + 1
        if len(self._failures) > _REMEMBERED:
            del self._failures[next(iter(self._failures))]
        return min(self._first * 2.0 ** min(before, 60), self._most, most)

    def forget(self, key: RunKey) -> None:
        """The run went well."""
        self._failures.pop(key, None)
