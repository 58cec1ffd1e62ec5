"""What broken engines do to calls: hooks of the proxy, each of which lies in one way.

``touches`` of each says which calls it may lie in, for scenes without such a call need not be played once more.
"""

from collections.abc import Callable, Sequence

import grpc
from google.protobuf.message import Message as ProtoMessage

from dualclaw import (
    AttachRequest,
    BusyPolicy,
    CancelRequest,
    CancelResponse,
    Decision,
    DecisionAction,
    EngineEvent,
    GetRunResponse,
    ListRunsRequest,
    ResumeRequest,
    RunRequest,
    RunState,
)
from dualclaw.errors import EngineError, Reason
from dualclaw.status import code_of, error_of, trailing_of
from dualclaw_clients.conformance.seen import Exchange

from .engine_proxy import Call, Honest, Refusal, Refused


class Requests(Honest):
    """Changes requests."""

    def __init__(self, change: Callable[[Call], None]) -> None:
        self._change = change

    def touches(self, call: Call, exchange: Exchange) -> bool:
        self._change(call)
        return call.request != exchange.request

    async def request(self, call: Call) -> None:
        self._change(call)


def requests(change: Callable[[Call], None]) -> Callable[[], Honest]:
    return lambda: Requests(change)


def one_less(call: Call) -> None:
    if isinstance(call.request, AttachRequest) and call.request.after_seq in (1, 2):
        call.request.after_seq -= 1


def forget_request_id(call: Call) -> None:
    if isinstance(call.request, RunRequest) and len(call.request.request_id) <= 256:  # longer ones are refused
        call.request.request_id = ""


def always_wait(call: Call) -> None:
    if isinstance(call.request, AttachRequest):
        call.request.wait = True


def never_wait(call: Call) -> None:
    if isinstance(call.request, AttachRequest) and not call.request.after_seq and call.scenario == "approval":
        call.request.wait = False


def decide_otherwise(
    old: DecisionAction.ValueType, new: DecisionAction.ValueType, args_json: str = ""
) -> Callable[[], Honest]:
    def change(call: Call) -> None:
        if isinstance(call.request, ResumeRequest) and call.scenario != "approvals":
            for decision in call.request.decisions:
                if decision.action == old:
                    decision.action = new
                    decision.args_json, decision.response_json = args_json, ""

    return requests(change)


def approve_the_rest(call: Call) -> None:
    if isinstance(call.request, ResumeRequest) and call.scenario == "approvals":
        decided = [decision.interrupt_id for decision in call.request.decisions]
        if decided == ["pay-a"]:
            action = DecisionAction.DECISION_ACTION_APPROVE
            call.request.decisions.append(Decision(interrupt_id="pay-b", action=action))


def starters_may_leave(call: Call) -> None:
    if isinstance(call.request, RunRequest):
        call.request.options.ClearField("on_disconnect")


def no_line(call: Call) -> None:
    if isinstance(call.request, RunRequest) and call.request.on_busy == BusyPolicy.BUSY_POLICY_QUEUE:
        call.request.on_busy = BusyPolicy.BUSY_POLICY_REJECT


def replace_nothing(call: Call) -> None:
    if isinstance(call.request, RunRequest) and call.request.on_busy == BusyPolicy.BUSY_POLICY_REPLACE:
        call.request.on_busy = BusyPolicy.BUSY_POLICY_QUEUE


def steps_as_ever(call: Call) -> None:
    if isinstance(call.request, RunRequest) and call.request.options.max_steps == 2:
        call.request.options.max_steps = 0


def one_page(call: Call) -> None:
    if isinstance(call.request, ListRunsRequest) and call.request.page_size == 1:
        call.request.page_size = 0


OWNERS, OTHERS = ((("authorization", f"Bearer {key}"),) for key in ("key-a", "key-b"))


def as_owner(*rpcs: str) -> Callable[[], Honest]:
    """Return hooks that make calls of these rpcs as the tenant "a", whoever calls."""

    def change(call: Call) -> None:
        is_join = isinstance(call.request, RunRequest) and not call.request.request_id
        if call.rpc in rpcs and call.metadata == OTHERS and not is_join:
            call.metadata = OWNERS

    return requests(change)


class Misnamed(Honest):
    """Refuses one reason as something else."""

    def __init__(self, reason: Reason, change: Callable[[Refusal], Refusal]) -> None:
        self._reason = reason
        self._change = change

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return exchange.status is not None and exchange.status.reason == self._reason

    def refusal(self, call: Call, refusal: Refusal) -> Refusal:
        error = error_of(refusal.code, refusal.text, refusal.trailing)
        return self._change(refusal) if error.reason == self._reason else refusal


def without_details(refusal: Refusal) -> Refusal:
    return Refusal(refusal.code, refusal.text)


def other_code(refusal: Refusal) -> Refusal:
    return Refusal(grpc.StatusCode.ABORTED, refusal.text, refusal.trailing)


def other_reason(reason: Reason) -> Callable[[Refusal], Refusal]:
    return lambda refusal: Refusal(refusal.code, refusal.text, trailing_of(EngineError(reason, refusal.text)))


def misnamed(reason: Reason, change: Callable[[Refusal], Refusal]) -> Callable[[], Honest]:
    return lambda: Misnamed(reason, change)


class BreaksOff(Honest):
    """Takes a request that is too large for its own fault."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.request.ByteSize() > 1_000_000

    def refusal(self, call: Call, refusal: Refusal) -> Refusal:
        large = call.request.ByteSize() > 1_000_000
        return Refusal(grpc.StatusCode.UNKNOWN, refusal.text) if large else refusal


class LongStatus(Honest):
    """Repeats in a refusal whatever it was asked."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return isinstance(call.request, RunRequest) and len(call.request.agent) > 1_000

    async def request(self, call: Call) -> None:
        if isinstance(call.request, RunRequest) and len(call.request.agent) > 1_000:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"no agent {call.request.agent}")


class ErrorAsStatus(Honest):
    """Fails runs by a status."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return any(event.WhichOneof("payload") == "error" for event in exchange.events)

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        if event.WhichOneof("payload") == "error":
            raise Refused(grpc.StatusCode.INTERNAL, event.error.message)
        return [event]


class RefusesTheEnd(Honest):
    """Refuses an attach that has nothing to read."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.rpc == "Attach"

    def end(self, call: Call) -> None:
        if call.rpc == "Attach" and not call.said:
            error = EngineError("AFTER_SEQ_OUT_OF_RANGE", "there is nothing left")
            raise Refused(code_of(error.reason), error.message, trailing_of(error))


class StoredOnly(Honest):
    """Ends an attach to a run that talks after what was stored."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.rpc == "Attach" and call.scenario == "slow"

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        live = isinstance(call.request, AttachRequest) and call.scenario == "slow" and not call.request.wait
        return [event] if not live or len(call.said) <= 3 else []


class AcceptsSome(Honest):
    """Accepts the good decisions of a call it refuses."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return isinstance(call.request, ResumeRequest) and len(call.request.decisions) == 2

    async def request(self, call: Call) -> None:
        if isinstance(call.request, ResumeRequest) and len(call.request.decisions) == 2:
            good = ResumeRequest(run_id=call.request.run_id, decisions=call.request.decisions[:1])
            await self.proxy.upstream(good, call.metadata)
            error = EngineError("UNKNOWN_INTERRUPT", "there is no such question")
            raise Refused(code_of(error.reason), error.message, trailing_of(error))


class BusyWithQuestions(Honest):
    """Does not take a message for the answer of a question."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.rpc == "Run" and call.scenario in {"question", "blue"}

    async def request(self, call: Call) -> None:
        if isinstance(call.request, RunRequest) and call.scenario == "blue":
            error = EngineError("CONVERSATION_BUSY", "the conversation waits for an answer")
            raise Refused(code_of(error.reason), error.message, trailing_of(error))


class Looks(Honest):
    """Changes what GetRun says of runs of one scenario."""

    def __init__(self, scenario: str, change: Callable[[GetRunResponse, int], None]) -> None:
        self._scenario = scenario
        self._change = change
        self._looks: dict[str, int] = {}

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.scenario == self._scenario

    def response(self, call: Call, response: ProtoMessage) -> ProtoMessage:
        if isinstance(response, GetRunResponse) and call.scenario == self._scenario:
            self._looks[call.run_id] = self._looks.get(call.run_id, 0) + 1
            self._change(response, self._looks[call.run_id])
        return response


def taken_for_approved(response: GetRunResponse, look: int) -> None:
    if response.run.state == RunState.RUN_STATE_INTERRUPTED and look > 2:  # conversation, parked, then still parked
        response.run.state = RunState.RUN_STATE_RUNNING
        del response.run.interrupts[:]


def no_questions(response: GetRunResponse, _: int) -> None:
    del response.run.interrupts[:]


class Deaf(Honest):
    """Answers Cancel for runs of one scenario, and does nothing."""

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.rpc == "Cancel" and call.scenario == self._scenario

    async def answer(self, call: Call) -> ProtoMessage | None:
        if isinstance(call.request, CancelRequest) and call.scenario == self._scenario:
            return CancelResponse(run=await self.proxy.look(call.run_id, call.metadata))
        return None


class RefusesFinal(Honest):
    """Refuses to cancel what is over."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return call.rpc == "Cancel"

    async def answer(self, call: Call) -> ProtoMessage | None:
        if isinstance(call.request, CancelRequest) and call.run_id in self.proxy.scenarios:
            run = await self.proxy.look(call.run_id, call.metadata)
            if run.state not in (RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_INTERRUPTED):
                error = EngineError("RUN_NOT_INTERRUPTED", "the run is over")
                raise Refused(code_of(error.reason), error.message, trailing_of(error))
        return None


class EndsWithStarter(Honest):
    """Cancels a run whose starter leaves, asked or not."""

    async def left(self, call: Call) -> None:
        if call.rpc == "Run" and call.run_id:
            await self.proxy.cancel(call.run_id, call.metadata)


class Forgets(Honest):
    """Has lost, after a crash, the last events of the run that talked."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return False  # nothing crashes in the usual scenes

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        lost = call.after_crash and call.scenario == "slow" and event.seq == 3
        return [] if lost else [event]


class Rewrites(Honest):
    """Has, after a crash, another text in a run that was over."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return False  # nothing crashes in the usual scenes

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        if call.after_crash and call.scenario == "text" and event.WhichOneof("payload") == "reasoning":
            event.reasoning.content = "Something else."
        return [event]


class ForgetsQuestions(Honest):
    """Knows, after a crash, no question of a parked run."""

    def touches(self, call: Call, exchange: Exchange) -> bool:
        return False  # nothing crashes in the usual scenes

    async def request(self, call: Call) -> None:
        if call.after_crash and isinstance(call.request, ResumeRequest):
            error = EngineError("UNKNOWN_INTERRUPT", "there is no such question")
            raise Refused(code_of(error.reason), error.message, trailing_of(error))
