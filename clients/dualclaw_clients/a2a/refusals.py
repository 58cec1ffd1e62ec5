"""What becomes of an engine's refusal: the error A2A has for it, or a status of the transport where it has none.

A2A names errors of tasks. Who may call, how much and whether anything is there is said by the transport itself, as
the specification wants it: HTTP 401 with a challenge, gRPC UNAUTHENTICATED and so on (``Refused``).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from a2a.utils.errors import (
    A2AError,
    InternalError,
    InvalidParamsError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from starlette.exceptions import HTTPException

from dualclaw.errors import EngineError, FieldError, Reason
from dualclaw.status import code_of
from dualclaw_clients.engine_client import EngineUnreachable

A2A_ERRORS: Final[Mapping[Reason, type[A2AError]]] = MappingProxyType(
    {
        "UNKNOWN_RUN": TaskNotFoundError,
        "UNKNOWN_AGENT": InvalidParamsError,
        "UNKNOWN_CONVERSATION": InvalidParamsError,
        "UNKNOWN_INTERRUPT": InvalidParamsError,
        "INVALID_REQUEST": InvalidParamsError,
        "REQUEST_ID_REUSED": InvalidParamsError,
        "ALREADY_ANSWERED": UnsupportedOperationError,
        "RUN_NOT_INTERRUPTED": UnsupportedOperationError,
        "CONVERSATION_BUSY": UnsupportedOperationError,
        "AFTER_SEQ_OUT_OF_RANGE": UnsupportedOperationError,
        "LOG_COMPACTED": UnsupportedOperationError,
    }
)
"""Reasons that A2A has an error for; every other reason is the transport's business."""
HTTP_STATUS: Final[Mapping[str, int]] = MappingProxyType(
    {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}
)
"""gRPC code name -> HTTP status of what the transport says; a code that is not here is 500."""
_IN_A2A_WORDS: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        "UNKNOWN_RUN": "there is no such task",
        "UNKNOWN_CONVERSATION": "there is no such context; leave context_id empty to begin a new one",
        "REQUEST_ID_REUSED": "the message_id was used for another message; give every message an id of its own",
        "RUN_NOT_INTERRUPTED": "the task does not wait for a message",
        "ALREADY_ANSWERED": "the task has its answer already; subscribe to it to see how it goes on",
        "LOG_COMPACTED": "the events of this task are no longer kept",
    }
)


class Refused(HTTPException):
    """A call the transport refuses; not one of A2A's own errors."""

    def __init__(self, error: EngineError) -> None:
        self.error = error
        code = error.metadata.get("grpc_code") or code_of(error.reason).name
        headers = {}
        if code == "UNAUTHENTICATED":
            headers["WWW-Authenticate"] = "Bearer"
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        super().__init__(HTTP_STATUS.get(code, 500), error.message, headers)


def refusal(error: EngineError) -> A2AError | Refused:
    """Return what a caller is told of a call that the engine has refused."""
    if isinstance(error, EngineUnreachable):  # its address is nobody's business here
        hint = {"hint": "Try again in a moment with the same message_id."}
        return Refused(EngineError(error.reason, "the engine cannot be reached", {"grpc_code": "UNAVAILABLE", **hint}))
    kind = A2A_ERRORS.get(error.reason)
    if kind is None:
        return Refused(error)
    words = error.message if error.reason in {"INVALID_REQUEST", "UNKNOWN_AGENT"} else ""
    data: dict[str, object] = {"reason": error.reason}
    if isinstance(error, FieldError):
        data["errors"] = [{"field": field, "message": problem} for field, problem in error.fields.items()]
    return kind(words or _IN_A2A_WORDS.get(error.reason, error.message), data)


def broken(error: EngineError, task_id: str) -> A2AError:
    """Return what a caller is told of a stream that broke for good after it had begun."""
    told = refusal(error)
    text = told.detail if isinstance(told, Refused) else told.message
    return InternalError(
        f"{text}; the task goes on: subscribe to task {task_id} to follow it", {"reason": error.reason}
    )


@contextmanager
def told() -> Iterator[None]:
    """Turn an engine's refusal into what the caller is told."""
    try:
        yield
    except EngineError as error:
        raise refusal(error) from None
