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
]
"""Names of ErrorReason without their prefix; a test holds them against the enum."""

REASONS: frozenset[str] = frozenset(get_args(Reason))


class EngineError(Exception):
    """A call was refused or a run failed, for a reason that programs can act on.

    Args:
        reason: a name of ErrorReason without prefix, such as "UNKNOWN_RUN".
        message: one sentence for people; says what is wrong and what would be right. No secrets.
        metadata: what a program needs to act, such as ``{"run_id": ...}``; goes into ErrorInfo.
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
