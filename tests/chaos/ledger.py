"""What the tools of the sweep have done in the world: a file that only grows, each line on disk before it counts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Effect:
    """One time that a tool did something."""

    run_id: str
    kind: str
    item: str
    key: str
    """The idempotency key it was called with."""


class Ledger:
    """Effects of all processes of a test, in a file each line of which was written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, effect: Effect) -> None:
        """Do it: append, and have it on the disk."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, f"{effect.run_id} {effect.kind} {effect.item} {effect.key}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)

    def effects(self, run_id: str = "") -> Sequence[Effect]:
        """Return what was done, by one run or by all."""
        if not self._path.exists():
            return []
        found = [Effect(*line.split(" ")) for line in self._path.read_text().splitlines()]
        return [effect for effect in found if not run_id or effect.run_id == run_id]
