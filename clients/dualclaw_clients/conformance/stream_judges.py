"""Judges of streams: the rules R1 to R12, what the messages carry, and whether the agent plays what it should.

A judge yields a text for each fault: where, what was expected, what was seen. It is a pure function; what it cannot
find raises Unseen, so that a rule nobody could test is never called kept.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualclaw import (
    DecisionAction,
    EngineEvent,
    GetRunResponse,
    InterruptKind,
    ListMessagesResponse,
    Phase,
    Run,
    RunState,
    Severity,
    Step,
    StepKind,
    StopReason,
)
from dualclaw.rules import check_stream
from dualclaw_clients.conformance.plays import ARGS, PLAYS
from dualclaw_clients.conformance.seen import Evidence, Exchange, Story, Unseen, is_terminal, last, short, text_of
from dualclaw_clients.conformance.web_seen import lifted

Judge = Callable[[Evidence], Iterable[str]]

_VIOLATION = re.compile(r"(R\d+) at (\d+): (.*)", re.DOTALL)


def stories_of(evidence: Evidence) -> Iterator[Story]:
    """Yield the runs that were seen from their first event on; those that never had one are for other judges."""
    for scene in evidence.scenes.values():
        for labels in scene.stories:
            events: list[EngineEvent] = []
            whole = True
            for label in labels:
                if label in scene.exchanges:
                    events += scene.exchanges[label].events
                    whole &= not scene.exchanges[label].late
                elif label in scene.http:
                    events += lifted(scene.http[label], len(events))
                    whole &= not scene.http[label].late
            if events:
                yield Story(f"{scene.name}/{'+'.join(labels)}", tuple(events), whole)


def rule(name: str, *needs: str, skip: Sequence[str] = ()) -> Judge:
    """Return the judge of one of R1 to R9.

    ``needs`` are scenes without which the rule was not put to the test, ``skip`` those it does not hold for.
    """

    def judge(evidence: Evidence) -> Iterator[str]:
        walks = [walk for walk in evidence.once(_walk) if walk.scene not in skip]
        for walk in walks:
            yield from (text for broken, text in walk.faults if broken == name)
        for scene in needs:
            if not evidence.scene(scene).stories:
                raise Unseen(f"scene {scene} broke off: {evidence.scene(scene).broke_off}")
            if scene not in {walk.scene for walk in walks}:
                raise Unseen(f"scene {scene} brought no events")

    return judge


@dataclass(frozen=True, slots=True)
class _Walk:
    """A story, walked over: the rules it breaks, and how."""

    scene: str
    faults: tuple[tuple[str, str], ...]


def _walk(evidence: Evidence) -> Sequence[_Walk]:
    return [_Walk(story.scene.partition("/")[0], tuple(_faults_of(story))) for story in stories_of(evidence)]


def _faults_of(story: Story) -> Iterator[tuple[str, str]]:
    if not story.whole:
        yield "R2", f"{story.scene}: the stream was still open when the kit gave up waiting"
    for violation in check_stream(story.events):
        found = _VIOLATION.fullmatch(violation)
        if found is None or (found[1] == "R2" and not story.whole):
            continue
        place = int(found[2])
        event = story.events[place - 1] if 0 < place <= len(story.events) else None
        yield found[1], f"{story.scene}, event {place}: {found[3]}; the event is {short(event)}"


def r10(evidence: Evidence) -> Iterator[str]:
    """Every client gets exactly the events after its position."""
    whole = evidence.call("text", "start").events
    for label, exchange in evidence.scene("text").exchanges.items():
        if label.startswith("after-"):
            after = int(label.removeprefix("after-"))
            yield from differs(f"text: Attach after {after}", exchange, whole[after:])
    talking = evidence.call("cancel", "start").events
    for after in (0, 2):
        yield from differs(f"cancel: a client that attached after {after} while the run talked",
                           evidence.call("cancel", f"live-{after}"), talking[after:])  # fmt: skip
    parked = evidence.call("approve", "start").events + evidence.call("approve", "resume").events
    yield from differs(
        "approve: a client that waited over the parked phase", evidence.call("approve", "waiting"), parked
    )


def r11(evidence: Evidence) -> Iterator[str]:
    """Failed and cancelled runs end with an event and status OK."""
    failed = evidence.call("error", "start")
    end = last(failed.events)
    if end is None or end.WhichOneof("payload") != "error":
        yield f"error: the run's last event is expected to be error; seen {short(end)}"
    elif end.error.diagnosis.code != "model.bad_response":
        yield f"error: diagnosis.code is expected to be model.bad_response; seen {end.error.diagnosis.code!r}"
    yield from not_ok("error", failed)
    yield from _state("error", evidence.call("error", "get"), RunState.RUN_STATE_FAILED)
    cancelled = evidence.call("cancel", "start")
    yield from not_ok("cancel", cancelled)
    yield from _cancelled("cancel", cancelled.events)
    yield from _state("cancel", evidence.call("cancel", "get"), RunState.RUN_STATE_CANCELLED)


def _cancelled(where: str, events: Sequence[EngineEvent]) -> Iterator[str]:
    end = last(events)
    if end is None or end.done.stop_reason != StopReason.STOP_REASON_CANCELLED:
        yield f"{where}: the last event is expected to be done with CANCELLED; seen {short(end)}"
    elif not end.done.content or end.done.content != text_of(events):
        yield f"{where}: done.content is expected to be the text so far, {text_of(events)!r}; seen {end.done.content!r}"


def r12(evidence: Evidence) -> Iterator[str]:
    """The same request_id gives the same events."""
    yield from differs("text: Run with the same request_id", evidence.call("text", "again"),
                       evidence.call("text", "start").events)  # fmt: skip
    yield from differs("approve: Resume with the same request_id", evidence.call("approve", "resume-again"),
                       evidence.call("approve", "resume").events)  # fmt: skip


def differs(where: str, exchange: Exchange, expected: Sequence[EngineEvent]) -> Iterator[str]:
    """Yield what tells a stream from the one expected: its first event that differs, its length, its status."""
    yield from not_ok(where, exchange)
    for place, (seen, wanted) in enumerate(zip(exchange.events, expected, strict=False), 1):
        if seen != wanted:
            yield f"{where}: event {place} is expected to be {short(wanted)}; seen {short(seen)}"
            return
    if len(exchange.events) != len(expected):
        extra = exchange.events[len(expected)] if len(exchange.events) > len(expected) else None
        told = f", the first too many is {short(extra)}" if extra else f", the last is {short(last(exchange.events))}"
        yield f"{where}: {len(expected)} events are expected; seen {len(exchange.events)}{told}"


def not_ok(where: str, exchange: Exchange) -> Iterator[str]:
    """Yield a fault if a stream did not end with OK."""
    if exchange.late:
        yield f"{where}: the stream is expected to end; it was still open when the kit gave up waiting"
    elif exchange.status is not None and exchange.status.code != "OK":
        yield f"{where}: status OK is expected; seen {exchange.status}: {exchange.status.text[:200]}"


def _state(where: str, exchange: Exchange, *states: RunState.ValueType) -> Iterator[str]:
    run = exchange.response.run if isinstance(exchange.response, GetRunResponse) else Run()
    if run.state not in states:
        wanted = " or ".join(RunState.Name(state) for state in states)
        yield f"{where}: GetRun is expected to say {wanted}; seen {state_name(run)}"


def state_name(run: Run) -> str:
    """Return the name of a run's state, also of one this code does not know."""
    return RunState.Name(run.state) if run.state in RunState.values() else f"state {run.state}"


def w1(evidence: Evidence) -> Iterator[str]:
    """Messages are messages of the contract, with at least one event, of known kinds and values."""
    for where, exchange in evidence.calls():
        for fault in exchange.faults:
            yield f"{where}: {fault}"
        for event in exchange.events:
            for fault in _unknown_values(event):
                yield f"{where}, seq {event.seq}: {fault}; the event is {short(event)}"
    evidence.call("text", "start")


def _unknown_values(event: EngineEvent) -> Iterator[str]:
    match event.WhichOneof("payload"):
        case None:
            yield "the event has no payload"
        case "step":
            yield from _unknown_in(event.step.step)
        case "done":
            if event.done.stop_reason not in StopReason.values() or not event.done.stop_reason:
                yield f"done.stop_reason is {event.done.stop_reason}"
            for step in event.done.process_steps:
                yield from _unknown_in(step)
        case "interrupt":
            for item in event.interrupt.items:
                if not item.kind or item.kind not in InterruptKind.values():
                    yield f"the kind of question {item.id!r} is {item.kind}"
                if not item.allowed_actions or not set(item.allowed_actions) <= set(DecisionAction.values()):
                    yield f"allowed_actions of question {item.id!r} are {list(item.allowed_actions)}"
        case _:
            pass


def _unknown_in(step: Step) -> Iterator[str]:
    if not step.kind or step.kind not in StepKind.values():
        yield f"the kind of step {step.name!r} is {step.kind}"
    if step.phase not in Phase.values():
        yield f"the phase of step {step.name!r} is {step.phase}"
    if step.HasField("diagnosis") and step.diagnosis.severity not in Severity.values():
        yield f"the severity of step {step.name!r} is {step.diagnosis.severity}"


def w2(evidence: Evidence) -> Iterator[str]:
    """Zero is sent as zero, and what is unknown is not sent."""
    for story in stories_of(evidence):
        for event in story.events:
            if event.WhichOneof("payload") == "step" and not event.step.HasField("index"):
                yield f"{story.scene}, seq {event.seq}: step.index is expected, also when it is 0; it is absent"
    end = last(evidence.call("text", "start").events)
    if end is None or end.WhichOneof("payload") != "done" or not end.done.HasField("usage"):
        yield f"text: done is expected to carry usage; seen {short(end)}"
        return
    usage = end.done.usage
    if (usage.input_tokens, usage.output_tokens) != (10, 5):
        yield f"text: usage is expected to be 10 tokens in, 5 out; seen {usage.input_tokens}, {usage.output_tokens}"
    if usage.HasField("reasoning_tokens") or usage.HasField("cached_tokens"):
        yield "text: reasoning_tokens and cached_tokens are unknown and expected to be absent; they are sent as numbers"


def w3(evidence: Evidence) -> Iterator[str]:
    """Arguments arrive as they were called with."""
    events = evidence.call("args", "start").events
    steps = [("step event", e.step.step) for e in events if e.WhichOneof("payload") == "step"]
    steps += [("done.process_steps", step) for e in events for step in e.done.process_steps]
    calls = [(where, step) for where, step in steps if step.name == "look"]
    if not calls:
        yield f"args: a step look is expected; seen {[step.name for _, step in steps]}"
    for where, step in calls:
        if step.args_json != ARGS:
            yield f"args: args_json of {where} is expected to be {ARGS}; seen {step.args_json}"
            return


def w4(evidence: Evidence) -> Iterator[str]:
    """A done names its message and its conversation."""
    end = last(evidence.call("text", "start").events)
    run = evidence.call("text", "get").response
    if end is None or not isinstance(run, GetRunResponse):
        yield f"text: a done and its run are expected; seen {short(end)}"
        return
    if end.done.conversation_id != run.run.conversation_id or not end.done.conversation_id:
        yield f"text: done.conversation_id is {end.done.conversation_id!r}, GetRun says {run.run.conversation_id!r}"
    listed = evidence.call("text", "messages").response
    messages = listed.messages if isinstance(listed, ListMessagesResponse) else ()
    texts = {message.id: "".join(part.text for part in message.parts) for message in messages}
    if texts.get(end.done.message_id) != end.done.content:
        yield (
            f"text: the message {end.done.message_id!r} is expected to be in ListMessages with done.content "
            f"{end.done.content!r}; seen {texts}"
        )
    if run.run.last_seq != end.seq:
        yield f"text: Run.last_seq is expected to be {end.seq}; seen {run.run.last_seq}"


_SCENES_OF_PLAYS: Final[Mapping[str, str]] = {"approval": "approve", "approvals": "partial"}
_UNPLAYED: Final = frozenset({"slow", "steady"})
"""Scenarios that no scene reads to their end."""


def s1(evidence: Evidence) -> Iterator[str]:
    """The agent plays the scenarios of its table."""
    for name, play in PLAYS.items():
        if name in _UNPLAYED:
            continue
        exchange = evidence.call(_SCENES_OF_PLAYS.get(name, name), "start")
        end = last(exchange.events)
        if end is None or not is_terminal(end):
            told = exchange.status if exchange.status is not None else "a stream that stayed open"
            yield f"{name}: a first segment is expected; seen {len(exchange.events)} events and {told}"
            continue
        is_error = end.WhichOneof("payload") == "error"
        ends = "error" if is_error else _stop_name(end)
        if ends != play.ends:
            yield f"{name}: it is expected to end with {play.ends}; seen {ends}"
        content = text_of(exchange.events) if is_error else end.done.content
        if not re.fullmatch(play.content, content, re.DOTALL):
            yield f"{name}: its text is expected to be {play.content!r}; seen {content[:200]!r}"
        steps = [named(step) for step in end.done.process_steps]
        if play.steps and steps != list(play.steps):
            yield f"{name}: its steps are expected to be {list(play.steps)}; seen {steps}"


def _stop_name(end: EngineEvent) -> str:
    reason = end.done.stop_reason
    name = StopReason.Name(reason) if reason in StopReason.values() else f"stop_reason {reason}"
    return name.removeprefix("STOP_REASON_")


def named(step: Step) -> str:
    """Return a step as the table of scenarios writes it."""
    kind = StepKind.Name(step.kind) if step.kind in StepKind.values() else str(step.kind)
    phase = Phase.Name(step.phase) if step.phase in Phase.values() else str(step.phase)
    return f"{kind.removeprefix('STEP_KIND_').lower()} {step.name} {phase.removeprefix('PHASE_').lower()}"


RULE_JUDGES: Final[Mapping[str, Judge]] = {
    "R1": rule("R1", "text", "approve"),
    "R2": rule("R2", "text", "approve"),
    "R3": rule("R3", "approve"),
    "R4": rule("R4", "tool", "approve"),
    "R5": rule("R5", "text", "rewind"),
    "R6": rule("R6", "text", "tool", "approve"),
    "R7": rule("R7", "tool", "reject"),
    "R8": rule("R8", "text", "approve"),
    "R9": rule("R9", "args"),
}
ENGINE_JUDGES: Final[Mapping[str, Judge]] = {
    "S1": s1,
    **RULE_JUDGES,
    "R10": r10,
    "R11": r11,
    "R12": r12,
    "W1": w1,
    "W2": w2,
    "W3": w3,
    "W4": w4,
}
