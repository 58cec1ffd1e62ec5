"""The rules R1 to R9 of a stream as one function, for tests and for the conformance kit.

It takes what a client of any server would have received and says what is wrong with it, so that every test
that gets hold of a stream can hold all of it against the contract and not only the part it is about.
R10 to R12 compare several streams, or a stream and its status; they need a server and are not here.
"""

from __future__ import annotations  # ValueType exists for type checkers only

import re
from collections.abc import Iterable, Sequence

from dualclaw.fold import RunView
from dualclaw.json_text import canonical_json, parse_args
from dualclaw.v1.event_pb2 import EngineEvent, Phase, Step, StepKind, StopReason

_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_INTERRUPTED = StopReason.STOP_REASON_INTERRUPTED


def check_stream(events: Iterable[EngineEvent]) -> list[str]:
    """Return the violations in the events of one run from seq 1 on, each as "R<n> at <seq>: what is wrong".

    The events may be those of several segments; the last segment must be complete. Empty: all is well.
    """
    check = _Check()
    for event in events:
        check.take(event)
    check.end()
    return check.violations


class _Check:
    """One walk over a run. Every rule is a method, called where its facts are known."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._view = RunView()
        self._seq = 0
        self._before: EngineEvent | None = None
        self._trace_id = ""
        self._run_id = ""
        self._last_of: dict[int, Step] = {}

    def take(self, event: EngineEvent) -> None:
        self._seq += 1
        if event.seq != self._seq:
            self._violated("R1", f"seq is {event.seq}, expected {self._seq}")
        self._ends(event)
        self._envelope(event)
        self._view.apply(_placed(event, self._seq))
        match event.WhichOneof("payload"):
            case "step":
                self._step(event)
            case "interrupt":
                if not event.interrupt.items:
                    self._violated("R3", "interrupt asks nothing")
                for item in event.interrupt.items:
                    self._args(item.args_json, f"question {item.id}")
            case "done":
                self._done(event)
            case _:
                pass
        self._before = event

    def end(self) -> None:
        if self._before is None:
            self._violated("R2", "there are no events")
        elif not _terminal(self._before):
            self._violated("R2", "the segment does not end with done or error")
        elif not _parked(self._before) and self._view.open_steps:
            self._violated("R4", f"the run is final but steps {sorted(self._view.open_steps)} are open")

    def _violated(self, rule: str, text: str) -> None:
        self.violations.append(f"{rule} at {self._seq}: {text}")

    def _ends(self, event: EngineEvent) -> None:
        """R2 and R3: what may follow what."""
        before = self._before
        parks = event.WhichOneof("payload") == "done" and event.done.stop_reason == _INTERRUPTED
        if before is not None and before.WhichOneof("payload") == "interrupt":
            if not parks:
                self._violated("R3", "interrupt is not followed at once by done with INTERRUPTED")
        elif parks:
            self._violated("R3", "done with INTERRUPTED does not follow an interrupt")
        if before is not None and _terminal(before) and not _parked(before):
            self._violated("R2", "an event follows the terminal event of a run that is final")

    def _envelope(self, event: EngineEvent) -> None:
        """R8: one trace per segment, one run id per run."""
        if self._before is None or _terminal(self._before):
            self._trace_id = event.trace_id
        if not _TRACE_ID.fullmatch(event.trace_id) or event.trace_id == "0" * 32:
            self._violated("R8", f"trace_id {event.trace_id!r} is not 32 hex digits")
        elif event.trace_id != self._trace_id:
            self._violated("R8", "trace_id changes within a segment")
        self._run_id = self._run_id or event.run_id
        if not event.run_id or event.run_id != self._run_id:
            self._violated("R8", f"run_id is {event.run_id!r}, expected {self._run_id!r}")

    def _step(self, event: EngineEvent) -> None:
        """R4: a step's life. R9: its arguments."""
        step = event.step.step
        self._args(step.args_json, f"step {step.name or event.step.index}")
        if not event.step.HasField("index") or event.step.index < 0:
            self._violated("R4", "a step has no index")
            return
        index = event.step.index
        before = self._last_of.get(index)
        self._last_of[index] = step
        if step.kind == StepKind.STEP_KIND_THINKING:
            if before is not None or step.phase != Phase.PHASE_UNSPECIFIED:
                self._violated("R4", f"thinking step {index} is not one event without phase")
            return
        if step.phase == Phase.PHASE_UNSPECIFIED:
            self._violated("R4", f"step {index} has no phase")
        if before is None:
            if step.phase in (Phase.PHASE_OK, Phase.PHASE_FAIL):
                self._violated("R4", f"step {index} ends without a start")
            return
        if before.phase in (Phase.PHASE_OK, Phase.PHASE_FAIL):
            self._violated("R4", f"step {index} goes on after its end")
        elif step.phase == Phase.PHASE_START and not _is_change(before, step):
            self._violated("R4", f"step {index} starts twice")
        if (before.kind, before.name, before.call_id) != (step.kind, step.name, step.call_id):
            self._violated("R4", f"index {index} is given to another step")

    def _done(self, event: EngineEvent) -> None:
        """R5, R6 and R7: the result says what the stream said. R9: its arguments."""
        done, view = event.done, self._view
        if done.content != view.text:
            self._violated("R5", f"done.content is {_short(done.content)}, the folded text {_short(view.text)}")
        if list(done.process_steps) != view.process_steps:
            said, folded = _brief(done.process_steps), _brief(view.process_steps)
            self._violated("R6", f"done.process_steps differ from the folded steps: {said} and {folded}")
        for rule_field, said_names, used in (
            ("used_skills", list(done.used_skills), view.used_skills),
            ("used_mcp", list(done.used_mcp), view.used_mcp),
        ):
            if said_names != used:
                self._violated("R7", f"{rule_field} is {said_names}, expected {used}")
        for step in done.process_steps:
            self._args(step.args_json, f"process step {step.name}")

    def _args(self, text: str, where: str) -> None:
        if text and text != canonical_json(parse_args(text)):
            self._violated("R9", f"args_json of {where} is not canonical: {_short(text)}")


def _placed(event: EngineEvent, seq: int) -> EngineEvent:
    """The event with the seq it should have: a wrong one is said once and must not hide the event's content."""
    if event.seq == seq:
        return event
    placed = EngineEvent()
    placed.CopyFrom(event)
    placed.seq = seq
    return placed


def _terminal(event: EngineEvent) -> bool:
    return event.WhichOneof("payload") in ("done", "error")


def _parked(event: EngineEvent) -> bool:
    return event.WhichOneof("payload") == "done" and event.done.stop_reason == _INTERRUPTED


def _is_change(before: Step, step: Step) -> bool:
    """Whether an open step's further event tells a change: it begins or ceases to wait. A plain repeat does not."""
    return before != step and (before.HasField("diagnosis") or step.HasField("diagnosis"))


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}... ({len(text)} characters)"


def _brief(steps: Sequence[Step]) -> list[str]:
    return [f"{step.name or 'thinking'}/{step.phase}" for step in steps]
