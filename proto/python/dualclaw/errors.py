"""The one error type of the contract, with the reason that programs act on.

Exception
  EngineError          a call was refused, or a run failed; ``reason`` is a name of ErrorReason
    FieldError         INVALID_REQUEST that names the fields and what would be right

Nothing here knows gRPC; ``dualclaw.status`` maps to and from a status.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

Reason = Literal[
    "INVALID_REQUEST",
    "UNKNOWN_AGENT",
    "UNKNOWN_RUN",
    "UNKNOWN_CONVERSATION",
    "UNKNOWN_INTERRUPT",
    "ALREADY_ANSWERED",
    "RUN_NOT_INTERRUPTED",
    "CONVERSATION_BUSY",
    "REQUEST_ID_REUSED",
    "AFTER_SEQ_OUT_OF_RANGE",
    "LOG_COMPACTED",
    "NOT_SWITCHABLE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "QUOTA_EXCEEDED",
    "OVERLOADED",
    "STORE_UNAVAILABLE",
    "MODEL_UNAVAILABLE",
    "MODEL_AUTH",
    "MODEL_OVERLOADED",
    "MODEL_TIMEOUT",
    "MODEL_STREAM_BROKEN",
    "MODEL_BAD_RESPONSE",
    "CONTEXT_OVERFLOW",
    "TOOL_UNKNOWN",
    "TOOL_BAD_ARGUMENTS",
    "TOOL_FAILED",
    "TOOL_TIMEOUT",
    "TOOL_REJECTED",
    "TOOL_SKIPPED",
    "TOOL_OUTCOME_UNKNOWN",
    "SLOW_CLIENT",
    "INTERNAL",
    "RUN_NOT_FINAL",
]
"""Names of ErrorReason without their prefix; a test holds them against the enum."""

REASONS: frozenset[str] = frozenset(get_args(Reason))

HINTS: Mapping[Reason, str] = MappingProxyType(
    {
        "INVALID_REQUEST": "Correct what is named and send it again.",
        "UNKNOWN_AGENT": "ListAgents names the agents; an empty name is the default agent.",
        "UNKNOWN_RUN": "Check the id; runs of other tenants and of deleted conversations are not found either.",
        "UNKNOWN_CONVERSATION": "Check the id, or leave conversation_id empty to begin a new conversation.",
        "UNKNOWN_INTERRUPT": "GetRun names the questions that are open.",
        "ALREADY_ANSWERED": "Attach to the run to see how it went on.",
        "RUN_NOT_INTERRUPTED": "Attach to the run; it waits for no answer.",
        "RUN_NOT_FINAL": "Cancel the run, or wait until it has ended.",
        "CONVERSATION_BUSY": "Wait for the active run, cancel it, or ask with on_busy QUEUE or REPLACE.",
        "REQUEST_ID_REUSED": "Use a new request_id for another request.",
        "AFTER_SEQ_OUT_OF_RANGE": "Attach with after_seq up to last_seq, or 0 for every event.",
        "LOG_COMPACTED": "ListMessages still has the conversation's messages.",
        "NOT_SWITCHABLE": "GetAgent says which interceptors may be switched; leave the others out.",
        "UNAUTHENTICATED": "Send a key that the engine knows as bearer token.",
        "PERMISSION_DENIED": "Use a key with the role this needs.",
        "QUOTA_EXCEEDED": "Try again after the time RetryInfo names.",
        "OVERLOADED": "Try again after the time RetryInfo names.",
        "STORE_UNAVAILABLE": "Try again in a moment, a start with the same request_id.",
        "SLOW_CLIENT": "Attach again after the last event you have.",
        "INTERNAL": "Try again; if it stays, the engine's log says more.",
    }
)
"""What a caller can do about a refusal. Failures of models and tools bring a hint of their own in their Diagnosis."""


class EngineError(Exception):
    """A call was refused or a run failed, for a reason that programs can act on.

    Args:
        reason: a name of ErrorReason without prefix, such as "UNKNOWN_RUN".
        message: one sentence for people; says what is wrong and what would be right. No secrets.
        metadata: what a program needs to act, such as ``{"run_id": ...}``; goes into ErrorInfo, there with
            ``hint``, what to do about it: the reason's own of ``HINTS`` when none is given here.
        retry_after: seconds after which the same call may work; None: unknown.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        metadata: Mapping[str, str] | None = None,
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.retry_after = retry_after
        self.hint = self.metadata.get("hint") or HINTS.get(reason, "")
        """What to do about it; "" when nothing can be said."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason}: {self.message})"


class FieldError(EngineError):
    """A request is malformed; ``fields`` maps each wrong field's path to what is wrong with it."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        text = "; ".join(f"{name}: {problem}" for name, problem in fields.items())
        super().__init__("INVALID_REQUEST", text)
        self.fields: Mapping[str, str] = MappingProxyType(dict(fields))


def diagnosis_code(reason: Reason) -> str:
    """Return a reason as a Diagnosis code: lower case, first underscore a dot ("TOOL_TIMEOUT" -> "tool.timeout")."""
    return reason.lower().replace("_", ".", 1)
