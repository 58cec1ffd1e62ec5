"""Errors as gRPC statuses and back."""

from typing import get_args

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualclaw.errors import EngineError, FieldError, Reason
from dualclaw.status import CODES, DETAILS_KEY, code_of, error_from_rpc, error_of, status_of, trailing_of

# Time says nothing here: the machine may be busy with other things.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# Page 1.4 by hand; what it does not name occurs in events only.
CODE_NAMES = {
    "INVALID_REQUEST": "INVALID_ARGUMENT",
    "UNKNOWN_AGENT": "NOT_FOUND",
    "UNKNOWN_RUN": "NOT_FOUND",
    "UNKNOWN_CONVERSATION": "NOT_FOUND",
    "UNKNOWN_INTERRUPT": "NOT_FOUND",
    "ALREADY_ANSWERED": "FAILED_PRECONDITION",
    "RUN_NOT_INTERRUPTED": "FAILED_PRECONDITION",
    "RUN_NOT_FINAL": "FAILED_PRECONDITION",
    "CONVERSATION_BUSY": "FAILED_PRECONDITION",
    "REQUEST_ID_REUSED": "ALREADY_EXISTS",
    "AFTER_SEQ_OUT_OF_RANGE": "OUT_OF_RANGE",
    "LOG_COMPACTED": "OUT_OF_RANGE",
    "NOT_SWITCHABLE": "PERMISSION_DENIED",
    "PERMISSION_DENIED": "PERMISSION_DENIED",
    "QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED",
    "OVERLOADED": "RESOURCE_EXHAUSTED",
    "SLOW_CLIENT": "RESOURCE_EXHAUSTED",
    "STORE_UNAVAILABLE": "UNAVAILABLE",
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "INTERNAL": "INTERNAL",
}
REASONS: tuple[Reason, ...] = get_args(Reason)


def back(error: EngineError) -> EngineError:
    """The error as a client sees it."""
    return error_of(code_of(error.reason), status_of(error).message, trailing_of(error))


def test_codes_are_those_of_the_contract() -> None:
    """The one table is the one of the design."""
    assert {reason: code.name for reason, code in CODES.items()} == CODE_NAMES


@pytest.mark.parametrize("reason", [r for r in REASONS if r not in CODE_NAMES])
def test_reason_of_events_has_the_code_of_a_fault(reason: Reason) -> None:
    """A reason that belongs into events only is INTERNAL when it ends up in a status all the same."""
    assert code_of(reason) is grpc.StatusCode.INTERNAL
    assert reason.startswith(("MODEL_", "TOOL_", "CONTEXT_"))


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_survives_the_way_to_the_client(reason: Reason) -> None:
    """Reason, text, metadata and wait arrive; the code's name is added."""
    error = back(EngineError(reason, "没有 run r1", {"run_id": "r1"}, retry_after=2.25))
    assert (error.reason, error.message, error.retry_after) == (reason, "没有 run r1", 2.25)
    assert dict(error.metadata) == {"run_id": "r1", "grpc_code": code_of(reason).name}


def test_details_are_the_standard_ones() -> None:
    """Any gRPC client finds ErrorInfo, BadRequest and RetryInfo in it, and the code in the status itself."""
    error = FieldError({"agent": "unknown"})
    error.retry_after = 1.0
    status = status_pb2.Status.FromString(dict(trailing_of(error))[DETAILS_KEY])
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert all(detail.Unpack(message) for detail, message in zip(status.details, (info, bad, retry), strict=True))
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "dualclaw")
    assert [(v.field, v.description) for v in bad.field_violations] == [("agent", "unknown")]
    assert retry.retry_delay.ToMilliseconds() == 1000


@pytest.mark.parametrize("reason", sorted(CODE_NAMES))
def test_every_refusal_tells_a_hint_to_any_client(reason: Reason) -> None:
    """ErrorInfo says what to do, also to a client that knows nothing of this package."""
    info = error_details_pb2.ErrorInfo()
    assert status_of(EngineError(reason, "no", {"run_id": "r1"})).details[0].Unpack(info)
    assert info.metadata["run_id"] == "r1"
    assert info.metadata["hint"] == EngineError(reason, "no").hint != ""
    assert not info.metadata["hint"].endswith("..."), "cut"


def test_a_hint_of_its_own_goes_before_the_reasons_and_last_of_all_pairs() -> None:
    """A raiser who knows more says more; and no hint pushes out what programs act on."""
    error = back(EngineError("UNKNOWN_AGENT", "no", {"hint": "ask Ann", "near": "assistant"}))
    assert (error.hint, error.metadata["near"]) == ("ask Ann", "assistant")
    crowded = {"hint": "ask Ann", **{str(n): "x" * 200 for n in range(5)}}
    metadata = back(EngineError("UNKNOWN_AGENT", "no", crowded)).metadata
    assert metadata.keys() >= {str(n) for n in range(5)}


def test_field_error_comes_back_as_one() -> None:
    """The fields and what is wrong with them arrive."""
    error = back(FieldError({"message.role": "must be USER", "agent": "unknown"}))
    assert isinstance(error, FieldError)
    assert dict(error.fields) == {"message.role": "must be USER", "agent": "unknown"}
    assert dict(error.metadata) == {"grpc_code": "INVALID_ARGUMENT"}


def test_no_wait_is_not_a_wait_of_zero() -> None:
    """Without RetryInfo nothing is said about when to come back; a past moment is now."""
    assert back(EngineError("OVERLOADED", "x")).retry_after is None
    assert back(EngineError("OVERLOADED", "x", retry_after=-3)).retry_after == 0
    assert back(EngineError("OVERLOADED", "x", retry_after=float("inf"))).retry_after == 86_400


@calm
@given(
    message=st.text(max_size=20_000),
    metadata=st.dictionaries(st.text(max_size=300), st.text(max_size=3_000), max_size=40),
    fields=st.dictionaries(st.text(max_size=500), st.text(max_size=3_000), min_size=1, max_size=40),
)
def test_status_stays_near_four_kilobytes(message: str, metadata: dict[str, str], fields: dict[str, str]) -> None:
    """However long the texts are, the trailing metadata stays below the limit of servers and proxies."""
    for error in (EngineError("INTERNAL", message, metadata, retry_after=1), FieldError(fields)):
        assert len(trailing_of(error)[0][1]) <= 4_000
        assert back(error).reason == error.reason


@pytest.mark.parametrize("character", ["x", "好", "🍸", "\ud800"])
def test_huge_texts_are_cut_at_a_character(character: str) -> None:
    """A long text of any kind is cut to a readable beginning."""
    huge = character * 20_000
    errors = (
        EngineError("INTERNAL", huge, {f"{huge}{n}": huge for n in range(100)}),
        FieldError({f"{huge}{n}": huge for n in range(100)}),
    )
    for error in errors:
        assert len(trailing_of(error)[0][1]) <= 4_000
        assert len(status_of(error).message.encode()) <= 1_000
        assert status_of(error).message.endswith("...")
        assert "\ufffd" not in status_of(error).message or character == "\ud800"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "INTERNAL"),
        (grpc.StatusCode.UNIMPLEMENTED, "INTERNAL"),
    ],
)
def test_foreign_status_gets_the_nearest_reason(code: grpc.StatusCode, reason: str) -> None:
    """A proxy's status without details keeps its text and names its code."""
    for trailing in (None, (), (("server", "nginx"),)):
        error = error_of(code, "upstream gone", trailing)
        assert (error.reason, error.message) == (reason, "upstream gone")
        assert dict(error.metadata) == {"grpc_code": code.name}


@pytest.mark.parametrize("broken", [b"\xff\xff\xff", b"\x0a", "text"])
def test_broken_details_do_not_hide_the_status(broken: bytes | str) -> None:
    """Bytes that are no status leave code and text."""
    error = error_of(grpc.StatusCode.UNAVAILABLE, "gone", ((DETAILS_KEY, broken),))
    assert (error.reason, error.message) == ("STORE_UNAVAILABLE", "gone")


@pytest.mark.parametrize(("domain", "reason"), [("example.com", "UNKNOWN_RUN"), ("dualclaw", "NEVER_HEARD_OF")])
def test_foreign_reason_is_not_taken_for_ours(domain: str, reason: str) -> None:
    """Another domain's reason, or one newer than this code, falls back to the code."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata={"a": "b"}))
    status = status_pb2.Status(code=7, message="no", details=[detail])
    error = error_of(grpc.StatusCode.PERMISSION_DENIED, "no", ((DETAILS_KEY, status.SerializeToString()),))
    assert (error.reason, error.message) == ("PERMISSION_DENIED", "no")


def test_broken_detail_does_not_hide_the_others() -> None:
    """One detail that cannot be read leaves the reason that another one gives."""
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    status = status_of(EngineError("UNKNOWN_RUN", "no"))
    status.details.insert(0, broken)
    error = error_of(grpc.StatusCode.NOT_FOUND, "no", ((DETAILS_KEY, status.SerializeToString()),))
    assert error.reason == "UNKNOWN_RUN"


async def call_that_fails(error: EngineError) -> EngineError:
    """Raise an error in a real server and return what a real client makes of it."""

    async def refuse(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(code_of(error.reason), status_of(error).message, trailing_of(error))

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("t", {"M": grpc.unary_unary_rpc_method_handler(refuse)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t/M")(b"", timeout=60)
    finally:
        await server.stop(0)
    return error_from_rpc(caught.value)


async def test_error_survives_a_real_call() -> None:
    """Over a real connection the client gets the error that the server raised."""
    error = await call_that_fails(EngineError("CONVERSATION_BUSY", "对话正忙", {"run_id": "r1"}, retry_after=3))
    assert (error.reason, error.message, error.retry_after) == ("CONVERSATION_BUSY", "对话正忙", 3)
    assert dict(error.metadata) == {"run_id": "r1", "grpc_code": "FAILED_PRECONDITION"}


async def test_huge_error_survives_a_real_call() -> None:
    """The worst text for the encodings of a header still arrives as what it is and not as a lost stream."""
    huge = "对话\ud800\n" * 10_000
    error = await call_that_fails(FieldError({f"{n}{huge}": huge for n in range(100)}))
    assert isinstance(error, FieldError)
    assert next(iter(error.fields)).startswith("0对话\ufffd\n对话")
    error = await call_that_fails(EngineError("UNKNOWN_RUN", huge, {f"{n}{huge}": huge for n in range(100)}))
    assert error.reason == "UNKNOWN_RUN"
    assert error.message.startswith("对话\ufffd\n对话")
