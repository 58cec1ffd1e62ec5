"""From what was seen to what is said: every check of a target, passed, failed or not checked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualclaw_clients.conformance.apart_judges import APART_JUDGES
from dualclaw_clients.conformance.call_judges import CALL_JUDGES
from dualclaw_clients.conformance.check import Check, Target
from dualclaw_clients.conformance.error_judges import ERROR_JUDGES
from dualclaw_clients.conformance.seen import Evidence, Unseen
from dualclaw_clients.conformance.stream_judges import ENGINE_JUDGES, Judge
from dualclaw_clients.conformance.web_judges import NATIVE_JUDGES, ORIGINAL_JUDGES

MOST_FAULTS: Final = 5
"""Faults of one check that are told; a server that is wrong is often wrong everywhere."""

JUDGES: Final[Mapping[Target, Mapping[str, Judge]]] = {
    "engine": {**ENGINE_JUDGES, **ERROR_JUDGES, **CALL_JUDGES, **APART_JUDGES},
    "native": NATIVE_JUDGES,
    "original": ORIGINAL_JUDGES,
}


class Outcome(Enum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Result:
    """A check and what became of it."""

    check: Check
    outcome: Outcome
    faults: tuple[str, ...] = ()
    """Each as "where: what is expected; what was seen"."""
    more: int = 0
    """Faults beyond those told."""
    why: str = ""
    """Why it was not checked."""


def judge(target: Target, checks: Sequence[Check], evidence: Evidence) -> Iterator[Result]:
    """Yield the result of each check."""
    for check in checks:
        faults: list[str] = []
        why = ""
        try:
            faults.extend(JUDGES[target][check.id](evidence))
        except Unseen as error:
            why = str(error)
        if faults:
            yield Result(check, Outcome.FAILED, tuple(faults[:MOST_FAULTS]), max(0, len(faults) - MOST_FAULTS))
        elif why:
            yield Result(check, Outcome.NOT_CHECKED, why=why)
        else:
            yield Result(check, Outcome.PASSED)


def failed_ids(results: Sequence[Result]) -> frozenset[str]:
    """Return the ids of the checks that failed."""
    return frozenset(result.check.id for result in results if result.outcome is Outcome.FAILED)
