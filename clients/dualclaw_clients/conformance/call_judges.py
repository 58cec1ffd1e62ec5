"""Judges of what calls do: attach, decisions, cancel, leaving, busy conversations and limits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dualclaw import (
    EngineEvent,
    GetRunResponse,
    ListMessagesResponse,
    ListRunsResponse,
    Phase,
    Run,
    RunState,
    StopReason,
)
from dualclaw_clients.conformance.plays import EDITED, HELLO
from dualclaw_clients.conformance.seen import Evidence, Exchange, last, short
from dualclaw_clients.conformance.stream_judges import Judge, differs, not_ok, state_name

PARKED: Final = RunState.RUN_STATE_INTERRUPTED


def nothing_left(evidence: Evidence) -> Iterator[str]:
    """At the end of a parked or final run an attach is an empty stream with OK."""
    for scene, label in ("text", "end"), ("text", "end-wait"), ("approve", "parked-end"):
        yield from differs(f"{scene}/{label}", evidence.call(scene, label), ())


def parked_attach(evidence: Evidence) -> Iterator[str]:
    """Without wait an attach ends where the run is parked."""
    expected = evidence.call("approve", "start").events
    yield from differs("approve/parked-attach", evidence.call("approve", "parked-attach"), expected)


def waits(evidence: Evidence) -> Iterator[str]:
    """With wait an attach stays over the parked phase until the run is final."""
    end = last(evidence.call("approve", "waiting").events)
    if end is None or end.done.stop_reason != StopReason.STOP_REASON_FINISHED:
        yield f"approve/waiting: its last event is expected to be done with FINISHED; seen {short(end)}"


def live(evidence: Evidence) -> Iterator[str]:
    """A client that attaches while the run talks gets what is stored, then what comes."""
    for label in ("live-0", "live-2"):
        exchange = evidence.call("cancel", label)
        yield from not_ok(f"cancel/{label}", exchange)
        end = last(exchange.events)
        if end is None or end.WhichOneof("payload") not in {"done", "error"}:
            yield f"cancel/{label}: the last event is expected to end the run; seen {short(end)}"


def _segment(evidence: Evidence, scene: str, label: str) -> Sequence[EngineEvent]:
    evidence.call(scene, "start")
    return evidence.call(scene, label).events


def call_ended(evidence: Evidence, scene: str, label: str, tool: str, phase: Phase.ValueType) -> Iterator[str]:
    """Yield a fault if the segment has no end of the tool's call in that phase, or none ended with FINISHED."""
    exchange = evidence.call(scene, label)
    yield from not_ok(f"{scene}/{label}", exchange)
    phases = [e.step.step.phase for e in exchange.events if e.step.step.name == tool]
    if phase not in phases:
        names = [Phase.Name(p) if p in Phase.values() else str(p) for p in phases]
        yield f"{scene}/{label}: an event of {tool} with {Phase.Name(phase)} is expected; seen {names}"
    end = last(exchange.events)
    if end is None or end.done.stop_reason != StopReason.STOP_REASON_FINISHED:
        yield f"{scene}/{label}: the last event is expected to be done with FINISHED; seen {short(end)}"


def approve(evidence: Evidence) -> Iterator[str]:
    """An approved call runs as it was asked."""
    yield from call_ended(evidence, "approve", "resume", "pay", Phase.PHASE_OK)
    end = last(_segment(evidence, "approve", "resume"))
    if end is not None and "paid 5 to a" not in end.done.content:
        yield f'approve/resume: an answer with "paid 5 to a" is expected; seen {short(end)}'


def reject(evidence: Evidence) -> Iterator[str]:
    """A rejected call never runs."""
    yield from call_ended(evidence, "reject", "resume", "pay", Phase.PHASE_FAIL)
    codes = [
        e.step.step.diagnosis.code
        for e in _segment(evidence, "reject", "resume")
        if e.step.step.phase == Phase.PHASE_FAIL
    ]
    if codes != ["tool.rejected"]:
        yield f"reject/resume: the call is expected to fail with tool.rejected; seen {codes}"


def edit(evidence: Evidence) -> Iterator[str]:
    """A call that is edited runs with the new arguments, and says so."""
    yield from call_ended(evidence, "edit", "resume", "pay", Phase.PHASE_OK)
    events = _segment(evidence, "edit", "resume")
    results = [e.step.step for e in events if e.step.step.phase == Phase.PHASE_OK]
    if not results or results[-1].args_json != EDITED or "paid 7 to a" not in results[-1].result:
        seen = [(step.args_json, step.result) for step in results]
        yield f'edit/resume: arguments {EDITED} and a result with "paid 7 to a" are expected; seen {seen}'


def partly(evidence: Evidence) -> Iterator[str]:
    """Answers that leave questions open give a segment of the rest."""
    kinds = [e.WhichOneof("payload") for e in _segment(evidence, "partial", "partial")]
    if kinds != ["interrupt", "done"]:
        yield f"partial/partial: a segment of interrupt and done is expected; seen {kinds}"
        return
    asked = [item.id for item in evidence.call("partial", "partial").events[0].interrupt.items]
    if asked != ["pay-b"]:
        yield f"partial/partial: the interrupt is expected to ask pay-b; seen {asked}"


def all_or_none(evidence: Evidence) -> Iterator[str]:
    """Of decisions with an unknown one among them none is accepted."""
    run = run_of(evidence.call("partial", "still-parked"))
    if [item.id for item in run.interrupts] != ["pay-b"]:
        yield f"partial/still-parked: pay-b is expected to be open after a call that was refused; seen {told(run)}"
    yield from call_ended(evidence, "partial", "rest", "pay", Phase.PHASE_FAIL)


def asks(evidence: Evidence) -> Iterator[str]:
    """A parked run says what it waits for, with the items of its interrupt."""
    for scene in ("approve", "question"):
        run = run_of(evidence.call(scene, "parked"))
        events = evidence.call(scene, "start").events
        items = next((list(e.interrupt.items) for e in events if e.WhichOneof("payload") == "interrupt"), [])
        if run.state != PARKED or list(run.interrupts) != items:
            ids = [item.id for item in items]
            yield f"{scene}/parked: GetRun is expected to say INTERRUPTED with {ids} as asked; seen {told(run)}"
        for item in items:
            if not item.id or not item.allowed_actions or not item.args_hash:
                yield f"{scene}/start: a question has an id, allowed_actions and args_hash; seen {item.id!r}"


def told(run: Run) -> str:
    """Return where a run stands and what it asks, for texts."""
    return f"{state_name(run)} with {[item.id for item in run.interrupts]}"


def responds(evidence: Evidence) -> Iterator[str]:
    """RESPOND answers a question."""
    yield from _answered(evidence, "respond", "resume", "green")


def message_answers(evidence: Evidence) -> Iterator[str]:
    """A message answers the one open question, and its stream is the next segment of the old run."""
    yield from _answered(evidence, "question", "answer", "blue")


def _answered(evidence: Evidence, scene: str, label: str, word: str) -> Iterator[str]:
    yield from call_ended(evidence, scene, label, "ask_user", Phase.PHASE_OK)
    events, before = _segment(evidence, scene, label), evidence.call(scene, "start").events
    if events and before and (events[0].run_id, events[0].seq) != (before[-1].run_id, before[-1].seq + 1):
        yield f"{scene}/{label}: the next segment of run {before[-1].run_id} is expected; seen {short(events[0])}"
    end = last(events)
    if end is not None and word not in end.done.content:
        yield f"{scene}/{label}: an answer with {word!r} is expected; seen {short(end)}"


def never_approves(evidence: Evidence) -> Iterator[str]:
    """A message never answers an approval."""
    run = run_of(evidence.call("approve", "still-parked"))
    if run.state != PARKED or [item.id for item in run.interrupts] != ["pay-a"]:
        yield f"approve/still-parked: after a message pay-a is expected to be open still; seen {told(run)}"


def run_of(exchange: Exchange) -> Run:
    """Return the run of a GetRun; an empty one when it was refused."""
    return exchange.response.run if isinstance(exchange.response, GetRunResponse) else Run()


def cancels_parked(evidence: Evidence) -> Iterator[str]:
    """A parked run that is cancelled gets a last segment with every step closed."""
    exchange = evidence.call("cancel-parked", "end")
    yield from not_ok("cancel-parked/end", exchange)
    end = last(exchange.events)
    if end is None or end.done.stop_reason != StopReason.STOP_REASON_CANCELLED:
        yield f"cancel-parked/end: the last event is expected to be done with CANCELLED; seen {short(end)}"
    run = run_of(evidence.call("cancel-parked", "get"))
    if run.state != RunState.RUN_STATE_CANCELLED or run.interrupts:
        yield f"cancel-parked/get: CANCELLED without questions is expected; seen {told(run)}"


def cancels_running(evidence: Evidence) -> Iterator[str]:
    """A run that talks ends soon after it was cancelled."""
    answer = evidence.call("cancel", "cancel")
    yield from not_ok("cancel/cancel", answer)
    yield from not_ok("cancel/start", evidence.call("cancel", "start"))
    words = len(evidence.call("cancel", "start").events)
    run = run_of(evidence.call("cancel", "get"))
    if run.state != RunState.RUN_STATE_CANCELLED:
        yield f"cancel/get: CANCELLED is expected after {words} events; seen {told(run)}"


def cancels_final(evidence: Evidence) -> Iterator[str]:
    """A final run is returned unchanged."""
    for scene, label, after in ("text", "cancel-final", "still"), ("cancel", "again", ""):
        yield from not_ok(f"{scene}/{label}", evidence.call(scene, label))
        before, run = run_of(evidence.call(scene, "get")), run_of(evidence.call(scene, after or "get"))
        if run != before:
            yield f"{scene}/{after}: the run is expected to be as before the cancel; seen {told(run)}"


def leaves_running(evidence: Evidence) -> Iterator[str]:
    """A run goes on when its starter leaves."""
    read = len(evidence.call("leave", "start").events)
    run = run_of(evidence.call("leave", "left"))
    if run.last_seq < read + 10 and run.state != RunState.RUN_STATE_SUCCEEDED:
        yield f"leave/left: a run beyond event {read + 10} is expected; seen {told(run)} at {run.last_seq}"


def leaves_cancelled(evidence: Evidence) -> Iterator[str]:
    """With CANCEL a run is cancelled once nobody has been attached for 10 seconds."""
    run = run_of(evidence.call("leave-cancel", "left"))
    if run.state != RunState.RUN_STATE_CANCELLED:
        yield f"leave-cancel/left: CANCELLED is expected 10 s after the starter left; seen {told(run)}"


def queues(evidence: Evidence) -> Iterator[str]:
    """Queued messages run after the active one, in the order they came."""
    waiting = evidence.call("queue", "waiting").response
    states = [run.state for run in waiting.runs] if isinstance(waiting, ListRunsResponse) else []
    queued = RunState.RUN_STATE_QUEUED
    if states[:2] != [queued, queued]:
        yield f"queue/waiting: two runs that are QUEUED are expected; seen states {states}"
    order = []
    for label in ("first", "second"):
        exchange = evidence.call("queue", label)
        yield from not_ok(f"queue/{label}", exchange)
        end = last(exchange.events)
        if end is None or end.done.content != HELLO:
            yield f"queue/{label}: done with {HELLO!r} is expected; seen {short(end)}"
        order.append(exchange.events[0].run_id if exchange.events else "")
    after = evidence.call("queue", "after").response
    ids = [run.id for run in after.runs] if isinstance(after, ListRunsResponse) else []
    if order[::-1] != ids[:2]:
        yield f"queue: the streams are expected to be of the runs in the order asked, {ids[1::-1]}; seen {order}"


def replaces(evidence: Evidence) -> Iterator[str]:
    """REPLACE cancels the active run and all that wait, then runs."""
    replacing = evidence.call("busy", "replacing")
    yield from not_ok("busy/replacing", replacing)
    end = last(replacing.events)
    if end is None or end.done.content != HELLO:
        yield f"busy/replacing: done with {HELLO!r} is expected; seen {short(end)}"
    labels = [label for label in evidence.scene("busy").exchanges if label.startswith("waiting-")]
    for label in ("active", *labels):
        end = last(evidence.call("busy", label).events)
        if end is None or end.done.stop_reason != StopReason.STOP_REASON_CANCELLED:
            yield f"busy/{label}: done with CANCELLED is expected; seen {short(end)}"


def lowers(evidence: Evidence) -> Iterator[str]:
    """max_steps lowers the agent's limit."""
    exchange = evidence.call("loop", "lowered")
    calls = {e.step.index for e in exchange.events if e.WhichOneof("payload") == "step"}
    end = last(exchange.events)
    if end is None or end.done.stop_reason != StopReason.STOP_REASON_STEP_LIMIT or not 1 <= len(calls) <= 2:
        yield f"loop/lowered: STEP_LIMIT after at most 2 calls is expected; seen {len(calls)} calls and {short(end)}"


def pages(evidence: Evidence) -> Iterator[str]:
    """Pages are as long as asked, come newest first, and each run is on one of them."""
    runs = [evidence.call("pages", f"run-{number}").events for number in range(3)]
    expected = [events[0].run_id if events else "" for events in reversed(runs)]
    labels = [label for label in evidence.scene("pages").exchanges if label.startswith("page-")]
    listed = [ids_of(evidence.call("pages", label)) for label in labels]
    if listed != [[name] for name in expected]:
        yield f"pages: pages of one run each are expected, the newest first: {expected}; seen {listed}"
    for label in ("default", "huge"):
        exchange = evidence.call("pages", label)
        yield from not_ok(f"pages/{label}", exchange)
        if ids_of(exchange) != expected:
            yield f"pages/{label}: {expected} is expected; seen {ids_of(exchange)}"
    found = evidence.call("pages", "messages").response
    roles = [message.role for message in found.messages] if isinstance(found, ListMessagesResponse) else []
    if roles != [2, 3] * 3:
        yield f"pages/messages: question and answer three times, the oldest first, are expected; seen roles {roles}"


def ids_of(exchange: Exchange) -> list[str]:
    """Return the ids of the runs a list holds."""
    return [run.id for run in exchange.response.runs] if isinstance(exchange.response, ListRunsResponse) else []


def too_large(evidence: Evidence) -> Iterator[str]:
    """A request that is too large is refused, and the next call works."""
    exchange = evidence.call("sizes", "large")
    if exchange.status is None or exchange.status.code not in {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"}:
        told = exchange.status or f"a stream with {len(exchange.events)} events"
        yield f"sizes/large: RESOURCE_EXHAUSTED or INVALID_ARGUMENT is expected; seen {told}"
    yield from not_ok("sizes/after", evidence.call("sizes", "after"))


CALL_JUDGES: Final[Mapping[str, Judge]] = {
    "A1": nothing_left,
    "A2": parked_attach,
    "A3": waits,
    "A4": live,
    "D1": approve,
    "D2": reject,
    "D3": edit,
    "D4": partly,
    "D5": all_or_none,
    "D6": responds,
    "D7": message_answers,
    "D8": never_approves,
    "D9": asks,
    "C1": cancels_running,
    "C2": cancels_parked,
    "C3": cancels_final,
    "L1": leaves_running,
    "L2": leaves_cancelled,
    "B1": queues,
    "B2": replaces,
    "M1": lowers,
    "M2": pages,
    "M3": too_large,
}
