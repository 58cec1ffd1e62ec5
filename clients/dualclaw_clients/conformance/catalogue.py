"""Everything the kit checks, as data: what a stranger reads in a report, and where the contract says it.

Every check names those that a server which fails it may fail as a consequence. What such a server fails beyond
them is a second fault. The judges stand under the same ids; a test holds the two together.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from dualclaw_clients.conformance.catalogue_calls import CALLS, ERRORS
from dualclaw_clients.conformance.catalogue_rules import RULES, WIRE
from dualclaw_clients.conformance.catalogue_web import FRAMES, HTTP
from dualclaw_clients.conformance.check import Check, Target

CHECKS: Final[Sequence[Check]] = (*RULES, *WIRE, *ERRORS, *CALLS, *FRAMES, *HTTP)
BY_ID: Final[Mapping[str, Check]] = MappingProxyType({check.id: check for check in CHECKS})


def checks_of(target: Target) -> Sequence[Check]:
    """Return the checks of a target, in the order of reports."""
    return [check for check in CHECKS if target in check.targets]


def implied_by(ids: Iterable[str]) -> frozenset[str]:
    """Return what may fail because these do."""
    return frozenset(other for id_ in ids for other in BY_ID[id_].implies)
