"""What broken engines do to events: hooks of the proxy, each of which lies in one way.

``touches`` of each says which calls it may lie in, for scenes without such a call need not be played once more.
"""

from collections.abc import Callable, Sequence

from dualclaw import (
    EngineEvent,
    Phase,
    Step,
    StopReason,
)
from dualclaw_clients.conformance.seen import Exchange

from .engine_proxy import Call, Honest

BIG = "12345678901234567890"
Change = Callable[[EngineEvent], Sequence[EngineEvent] | None]


def steps_of(event: EngineEvent) -> Sequence[Step]:
    """Return the steps an event holds."""
    return [event.step.step] if event.WhichOneof("payload") == "step" else list(event.done.process_steps)


class Altered(Honest):
    """Changes events of one scenario, in every call alike."""

    def __init__(self, scenario: str, change: Change, rpcs: Sequence[str] = ("Run", "Resume", "Attach")) -> None:
        self._scenario = scenario
        self._change = change
        self._rpcs = rpcs

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.scenario == self._scenario and call.rpc in self._rpcs

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        if call.scenario != self._scenario or call.rpc not in self._rpcs:
            return [event]
        changed = self._change(event)
        return [event] if changed is None else changed


def altered(scenario: str, change: Change, *rpcs: str) -> Callable[[], Honest]:
    return lambda: Altered(scenario, change, rpcs or ("Run", "Resume", "Attach"))


def is_done(event: EngineEvent) -> bool:
    return event.WhichOneof("payload") == "done"


def rename_fetch(event: EngineEvent) -> None:
    for step in steps_of(event):
        if step.name == "fetch":
            step.name = "fetched"
    if event.done.used_mcp:
        event.done.used_mcp[:] = ["fetched"]


def repeat_seq(event: EngineEvent) -> None:
    if event.seq == 3:
        event.seq = 2


def skip_seq(event: EngineEvent) -> None:
    if event.seq >= 3:
        event.seq += 1


def drop_done(event: EngineEvent) -> Sequence[EngineEvent]:
    return [] if is_done(event) else [event]


def go_on_after_done(event: EngineEvent) -> Sequence[EngineEvent]:
    if not is_done(event):
        return [event]
    more = EngineEvent(seq=event.seq + 1, run_id=event.run_id, trace_id=event.trace_id)
    more.delta.content = "and another thing"
    return [event, more]


def never_parked(event: EngineEvent) -> None:
    if event.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED:
        event.done.stop_reason = StopReason.STOP_REASON_FINISHED


def drop_index(event: EngineEvent) -> None:
    if event.WhichOneof("payload") == "step" and event.step.index == 0:
        event.step.ClearField("index")


def longer_done(event: EngineEvent) -> None:
    if is_done(event):
        event.done.content += "!"


def other_result(event: EngineEvent) -> None:
    if is_done(event):
        event.done.process_steps[0].result = "something else"


def other_order(event: EngineEvent) -> None:
    if is_done(event):
        event.done.used_skills[:] = list(reversed(event.done.used_skills))


def other_trace(event: EngineEvent) -> None:
    if event.seq == 2:
        event.trace_id = "0af7651916cd43dd8448eb211c80319c"


def no_run_id(event: EngineEvent) -> None:
    if event.seq == 2:
        event.run_id = ""


def dense_args(event: EngineEvent) -> None:
    for step in steps_of(event):
        step.args_json = step.args_json.replace('": ', '":')


def double_number(event: EngineEvent) -> None:
    for step in steps_of(event):
        step.args_json = step.args_json.replace(BIG, "1.2345678901234567e+19")


def other_text(event: EngineEvent) -> None:
    if event.WhichOneof("payload") == "delta":
        event.delta.content = "Hallo"


def known_usage(event: EngineEvent) -> None:
    if is_done(event):
        event.done.usage.reasoning_tokens = 0


def other_message(event: EngineEvent) -> None:
    if is_done(event):
        event.done.message_id = "0190ffff-0000-7000-8000-00000000beef"


def finished_instead(event: EngineEvent) -> None:
    if event.done.stop_reason == StopReason.STOP_REASON_CANCELLED:
        event.done.stop_reason = StopReason.STOP_REASON_FINISHED


class StartsTwice(Honest):
    """Opens the first step of ``tool`` twice."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.scenario == "tool"

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        if call.scenario != "tool":
            return [event]
        event.seq += call.shift
        if event.step.step.name == "look" and event.step.step.phase == Phase.PHASE_START:
            call.shift = 1
            again = EngineEvent.FromString(event.SerializeToString())
            again.seq += 1
            return [event, again]
        return [event]


class EmptyMessage(Honest):
    """Sends a message without events in between."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.scenario == "tool"

    def message(self, call: Call, events: Sequence[EngineEvent]) -> Sequence[bytes]:
        return [*super().message(call, events), *([b""] if call.scenario == "tool" else [])]
