"""The one table between reasons and gRPC codes, and the way to and from a rich status.

A status carries google.rpc.ErrorInfo (domain "dualclaw", reason = the ErrorReason name), BadRequest for a
FieldError and RetryInfo where a wait helps. It travels in trailing metadata, in base64 and beside the
percent-encoded message, and servers and proxies limit all of that together to about 8 kB. So texts are cut:
the status stays below 4 kB.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from dualclaw.errors import HINTS, REASONS, EngineError, FieldError, Reason
from dualclaw.json_text import clean_text

DOMAIN = "dualclaw"
DETAILS_KEY = "grpc-status-details-bin"
MAX_TEXT = 1_000
"""Bytes of the message."""
MAX_PAIRS = 1_200
"""Bytes of all metadata, and of all fields with what is wrong with them."""
MAX_RETRY_AFTER = 86_400.0
"""Seconds of the longest wait told; infinity has no form."""

C = grpc.StatusCode
CODES: Mapping[Reason, grpc.StatusCode] = {
    "INVALID_REQUEST": C.INVALID_ARGUMENT,
    "UNKNOWN_AGENT": C.NOT_FOUND,
    "UNKNOWN_RUN": C.NOT_FOUND,
    "UNKNOWN_CONVERSATION": C.NOT_FOUND,
    "UNKNOWN_INTERRUPT": C.NOT_FOUND,
    "ALREADY_ANSWERED": C.FAILED_PRECONDITION,
    "RUN_NOT_INTERRUPTED": C.FAILED_PRECONDITION,
    "RUN_NOT_FINAL": C.FAILED_PRECONDITION,
    "CONVERSATION_BUSY": C.FAILED_PRECONDITION,
    "REQUEST_ID_REUSED": C.ALREADY_EXISTS,
    "AFTER_SEQ_OUT_OF_RANGE": C.OUT_OF_RANGE,
    "LOG_COMPACTED": C.OUT_OF_RANGE,
    "NOT_SWITCHABLE": C.PERMISSION_DENIED,
    "UNAUTHENTICATED": C.UNAUTHENTICATED,
    "PERMISSION_DENIED": C.PERMISSION_DENIED,
    "QUOTA_EXCEEDED": C.RESOURCE_EXHAUSTED,
    "OVERLOADED": C.RESOURCE_EXHAUSTED,
    "STORE_UNAVAILABLE": C.UNAVAILABLE,
    "SLOW_CLIENT": C.RESOURCE_EXHAUSTED,
    "INTERNAL": C.INTERNAL,
}
"""Reasons that refuse a call. The others (MODEL_*, TOOL_*, CONTEXT_OVERFLOW) occur in events only."""

# What a foreign or transport-level status means to a caller who finds no ErrorInfo in it.
_FALLBACK: Mapping[grpc.StatusCode, Reason] = {
    C.INVALID_ARGUMENT: "INVALID_REQUEST",
    C.UNAUTHENTICATED: "UNAUTHENTICATED",
    C.PERMISSION_DENIED: "PERMISSION_DENIED",
    C.RESOURCE_EXHAUSTED: "OVERLOADED",
    C.UNAVAILABLE: "STORE_UNAVAILABLE",
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """Return the gRPC code of a reason; INTERNAL for one that belongs into events only."""
    return CODES.get(reason, C.INTERNAL)


def status_of(error: EngineError) -> status_pb2.Status:
    """Return the rich status of an error: code, message and details."""
    # The hint comes last: what programs act on must not fall to the limit because of it.
    pairs = {name: text for name, text in error.metadata.items() if name != "hint"}
    metadata = dict(_fit({**pairs, "hint": error.hint} if error.hint else pairs))
    details: list[any_pb2.Any] = [
        _pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    ]
    if isinstance(error, FieldError):
        bad = error_details_pb2.BadRequest()
        for field, problem in _fit(error.fields):
            bad.field_violations.add(field=field, description=problem)
        details.append(_pack(bad))
    if error.retry_after is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(round(min(max(0.0, error.retry_after), MAX_RETRY_AFTER) * 1000))
        details.append(_pack(info))
    return status_pb2.Status(
        code=code_of(error.reason).value[0], message=_cut(error.message, MAX_TEXT), details=details
    )


def error_of(code: grpc.StatusCode, text: str, trailing: Iterable[tuple[str, str | bytes]] | None) -> EngineError:
    """Return the EngineError a status stands for, from its code, its text and its trailing metadata.

    A status without our ErrorInfo (a proxy's, or a transport error) gets the nearest reason; its code's
    name is in ``metadata["grpc_code"]`` in both cases.
    """
    status = _status_from(trailing)
    metadata = {"grpc_code": code.name}
    reason: Reason = _FALLBACK.get(code, "INTERNAL")
    fields: dict[str, str] = {}
    retry_after: float | None = None
    for detail in status.details if status else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(info) and info.domain == DOMAIN and info.reason in REASONS:
                reason = info.reason
                metadata = {**info.metadata, **metadata}
                if "hint" in metadata and metadata["hint"] == HINTS.get(reason):
                    del metadata["hint"]  # the error says it by itself, so it comes back as it was raised
            elif detail.Unpack(bad):
                fields = {v.field: v.description for v in bad.field_violations}
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToMilliseconds() / 1000
        except DecodeError:  # a foreign server's bytes; the other details still speak
            continue
    if fields and reason == "INVALID_REQUEST":
        error = FieldError(fields)
        error.metadata, error.retry_after = MappingProxyType(metadata), retry_after
        error.hint = metadata.get("hint") or error.hint
        return error
    return EngineError(reason, status.message if status else text, metadata, retry_after=retry_after)


def error_from_rpc(error: grpc.RpcError) -> EngineError:
    """Return the EngineError that an ``RpcError`` (sync or aio) of a call stands for."""
    if isinstance(error, grpc.aio.AioRpcError):
        trailing = error.trailing_metadata()
        return error_of(error.code(), error.details() or "", tuple(trailing) if trailing is not None else ())
    call: grpc.Call = error  # type: ignore[assignment]  # the sync API raises an object that is both
    return error_of(call.code(), call.details() or "", [(k, v) for k, v in call.trailing_metadata() or ()])


def trailing_of(error: EngineError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries the rich status, for ``context.abort``."""
    return ((DETAILS_KEY, status_of(error).SerializeToString()),)


def _status_from(trailing: Iterable[tuple[str, str | bytes]] | None) -> status_pb2.Status | None:
    for key, value in trailing or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # a foreign server's bytes; the plain code and text still speak
                return None
    return None


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _fit(pairs: Mapping[str, str]) -> list[tuple[str, str]]:
    """The first pairs that fit into the status, each cut to a readable length."""
    found: list[tuple[str, str]] = []
    room = MAX_PAIRS
    for name, text in pairs.items():
        pair = (_cut(name, 100), _cut(text, 200))
        room -= len(pair[0].encode()) + len(pair[1].encode()) + 8
        if room < 0:
            break
        found.append(pair)
    return found


def _cut(text: str, limit: int) -> str:
    raw = clean_text(text[: limit + 1]).encode()
    return raw.decode() if len(raw) <= limit else raw[: limit - 3].decode("utf-8", "ignore") + "..."
