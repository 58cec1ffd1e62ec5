"""What must be found on a server that is wrong in one way, and nothing else."""

from collections.abc import Iterator, Mapping, Sequence

from dualclaw_clients.conformance.catalogue import implied_by


def disagreements(name: str, fails: Sequence[str], found: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Say what the kit missed on a broken server, and what it found beyond what its checks name as implied.

    Args:
        name: of the server.
        fails: ids of the checks that it must fail.
        found: faults by the id of the check that found them.
    """
    for id_ in set(fails) - set(found):
        yield f"{name}: missed {id_}"
    for id_ in set(found) - set(fails) - implied_by(fails):
        yield f"{name}: beyond {id_}: {found[id_][0]}"
