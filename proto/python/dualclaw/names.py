"""The lower-case names under which enum values appear on the wire and in calls of the factories."""

from __future__ import annotations  # ValueType exists for type checkers only

from collections.abc import Mapping

from dualclaw.v1.event_pb2 import DecisionAction, InterruptKind, Phase, StepKind, StopReason

KINDS: Mapping[str, StepKind.ValueType] = {
    "thinking": StepKind.STEP_KIND_THINKING,
    "skill": StepKind.STEP_KIND_SKILL,
    "mcp": StepKind.STEP_KIND_MCP,
    "agent": StepKind.STEP_KIND_AGENT,
    "kb": StepKind.STEP_KIND_KB,
    "media": StepKind.STEP_KIND_MEDIA,
}
PHASES: Mapping[str, Phase.ValueType] = {
    "start": Phase.PHASE_START,
    "ok": Phase.PHASE_OK,
    "fail": Phase.PHASE_FAIL,
}
INTERRUPT_KINDS: Mapping[str, InterruptKind.ValueType] = {
    "approval": InterruptKind.INTERRUPT_KIND_APPROVAL,
    "question": InterruptKind.INTERRUPT_KIND_QUESTION,
}
ACTIONS: Mapping[str, DecisionAction.ValueType] = {
    "approve": DecisionAction.DECISION_ACTION_APPROVE,
    "reject": DecisionAction.DECISION_ACTION_REJECT,
    "edit": DecisionAction.DECISION_ACTION_EDIT,
    "skip": DecisionAction.DECISION_ACTION_SKIP,
    "respond": DecisionAction.DECISION_ACTION_RESPOND,
}
STOP_REASONS: Mapping[str, StopReason.ValueType] = {
    "finished": StopReason.STOP_REASON_FINISHED,
    "return_direct": StopReason.STOP_REASON_RETURN_DIRECT,
    "step_limit": StopReason.STOP_REASON_STEP_LIMIT,
    "budget_exceeded": StopReason.STOP_REASON_BUDGET_EXCEEDED,
    "loop_detected": StopReason.STOP_REASON_LOOP_DETECTED,
    "rejected": StopReason.STOP_REASON_REJECTED,
    "exited": StopReason.STOP_REASON_EXITED,
    "interrupted": StopReason.STOP_REASON_INTERRUPTED,
    "cancelled": StopReason.STOP_REASON_CANCELLED,
}

KIND_NAMES: Mapping[int, str] = {number: name for name, number in KINDS.items()}
PHASE_NAMES: Mapping[int, str] = {number: name for name, number in PHASES.items()}
INTERRUPT_KIND_NAMES: Mapping[int, str] = {number: name for name, number in INTERRUPT_KINDS.items()}
ACTION_NAMES: Mapping[int, str] = {number: name for name, number in ACTIONS.items()}
