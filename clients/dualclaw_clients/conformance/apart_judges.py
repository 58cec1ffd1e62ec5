"""Judges of what needs more than one caller or a server that may be killed: tenants, and a crash."""

from collections.abc import Iterator, Mapping
from typing import Final

from dualclaw import ListConversationsResponse, Phase, RunState
from dualclaw_clients.conformance.call_judges import PARKED, call_ended, ids_of, run_of, told
from dualclaw_clients.conformance.error_judges import refused
from dualclaw_clients.conformance.seen import Evidence, last, short
from dualclaw_clients.conformance.stream_judges import Judge, differs, not_ok


def hides_runs(evidence: Evidence) -> Iterator[str]:
    """A run of another tenant is as unknown as one that never was."""
    for label in ("get", "attach", "cancel", "resume"):
        yield from refused(f"tenants/{label}", evidence.call("tenants", label), "UNKNOWN_RUN")
    for label in ("messages", "join"):
        yield from refused(f"tenants/{label}", evidence.call("tenants", label), "UNKNOWN_CONVERSATION")
    run = run_of(evidence.call("tenants", "still-parked"))
    if run.state != PARKED:
        yield f"tenants/still-parked: INTERRUPTED is expected after what another tenant tried; seen {told(run)}"


def hides_lists(evidence: Evidence) -> Iterator[str]:
    """Lists hold what is the caller's own."""
    own = evidence.call("tenants", "own-list")  # there is one only if the run has an id
    run_id = evidence.call("tenants", "start").events[0].run_id
    if run_id not in ids_of(own):
        yield f"tenants/own-list: run {run_id} is expected among the tenant's own"
    if run_id in ids_of(evidence.call("tenants", "list")):
        yield f"tenants/list: run {run_id} of another tenant is in the list"
    other = evidence.call("tenants", "conversations").response
    conversation_id = run_of(evidence.call("tenants", "still-parked")).conversation_id
    if isinstance(other, ListConversationsResponse) and conversation_id in {c.id for c in other.conversations}:
        yield f"tenants/conversations: conversation {conversation_id} of another tenant is in the list"


def own_request_ids(evidence: Evidence) -> Iterator[str]:
    """A request_id is one tenant's own."""
    other = evidence.call("tenants", "same-request-id")
    own = evidence.call("tenants", "start").events
    yield from not_ok("tenants/same-request-id", other)
    if not other.events or other.events[0].run_id == own[0].run_id:
        yield f"tenants/same-request-id: another run is expected; seen {short(last(other.events))}"


def survives(evidence: Evidence) -> Iterator[str]:
    """A run that was talking when its server was killed goes on: no event lost, none doubled, none changed."""
    before, whole = evidence.call("crash", "talking").events, evidence.call("crash", "whole")
    yield from not_ok("crash/whole", whole)
    # What was lost with the server may have been sent but not read; what was read must be there.
    for place, (seen, wanted) in enumerate(zip(whole.events, before, strict=False), 1):
        if seen != wanted:
            yield f"crash/whole: event {place} is expected to be {short(wanted)}; seen {short(seen)}"
            break
    if len(whole.events) <= len(before):
        yield f"crash/whole: more than the {len(before)} events before the crash are expected; seen {len(whole.events)}"
    yield from differs("crash/again: Run with the same request_id", evidence.call("crash", "again"), whole.events)
    state = run_of(evidence.call("crash", "get")).state
    if state != RunState.RUN_STATE_SUCCEEDED:
        yield f"crash/get: SUCCEEDED is expected; seen {told(run_of(evidence.call('crash', 'get')))}"


def keeps(evidence: Evidence) -> Iterator[str]:
    """What was stored before a crash is there after it."""
    for label in ("final", "parked"):
        expected = evidence.call("crash", label).events
        yield from differs(f"crash/{label}-again", evidence.call("crash", f"{label}-again"), expected)


def answers_after_crash(evidence: Evidence) -> Iterator[str]:
    """A run that waited for people when its server was killed can be answered."""
    yield from call_ended(evidence, "crash", "resume", "pay", Phase.PHASE_OK)


APART_JUDGES: Final[Mapping[str, Judge]] = {
    "T1": hides_runs,
    "T2": hides_lists,
    "T3": own_request_ids,
    "K1": survives,
    "K2": keeps,
    "K3": answers_after_crash,
}
