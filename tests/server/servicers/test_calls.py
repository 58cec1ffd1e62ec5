import asyncio
import logging

import grpc
import pytest

from dualclaw import (
    AttachRequest,
    CancelRequest,
    GetRunRequest,
    InterruptItem,
    RememberScope,
    ResumeRequest,
    RunRequest,
    RunState,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw.status import error_from_rpc
from dualclaw_server.engine.caller import TraceParent
from dualclaw_server.engine.store import Fenced, Full, RunKey, Unavailable
from tests.server.servicers.conftest import SUCCEEDED, TIMEOUT, Bench, Serve, delta, done, question


async def refusal_of_run(
    bench: Bench, failure: BaseException | None = None, request: RunRequest | None = None
) -> EngineError:
    bench.runs.failure = failure
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT):
            await bench.engine.Run(request or question()).read()
    return error_from_rpc(caught.value)


async def test_an_engine_error_arrives_whole(bench: Bench) -> None:
    """Reason, text, metadata and the time to wait survive the way through status and trailers."""
    error = await refusal_of_run(
        bench, EngineError("CONVERSATION_BUSY", "busy with r1", {"run_id": "r1"}, retry_after=2.5)
    )
    assert (error.reason, error.message, error.retry_after) == ("CONVERSATION_BUSY", "busy with r1", 2.5)
    assert (error.metadata["run_id"], error.metadata["grpc_code"]) == ("r1", "FAILED_PRECONDITION")


async def test_a_malformed_request_names_its_fields_and_starts_nothing(bench: Bench) -> None:
    """BadRequest carries every violation; the engine is not asked."""
    error = await refusal_of_run(bench, request=RunRequest(claw="c" * 65))
    assert isinstance(error, FieldError)
    assert set(error.fields) == {"claw", "message"}
    assert bench.runs.started == []


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(Full(), "OVERLOADED"), (Unavailable(), "STORE_UNAVAILABLE"), (Fenced("other"), "STORE_UNAVAILABLE")],
)
async def test_a_failing_store_is_told_apart_and_worth_a_retry(bench: Bench, failure: Exception, reason: str) -> None:
    """A full store is RESOURCE_EXHAUSTED, a silent one UNAVAILABLE; both say when to come back."""
    error = await refusal_of_run(bench, failure)
    assert error.reason == reason
    assert error.retry_after == 1.0


async def test_what_nobody_foresaw_goes_to_the_log_and_not_to_the_client(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns INTERNAL and the trace id; the log has the traceback under the same id."""
    with caplog.at_level(logging.ERROR):
        error = await refusal_of_run(bench, ZeroDivisionError("secret detail"))
    assert (error.reason, error.metadata["grpc_code"]) == ("INTERNAL", "INTERNAL")
    assert "secret detail" not in error.message
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.__dict__["trace_id"] == error.metadata["trace_id"] == bench.runs.started[0][2].trace_id


async def test_a_cancellation_from_inside_never_leaves_a_client_waiting(bench: Bench) -> None:
    """With nobody having cancelled the call, it ends INTERNAL instead of not at all."""
    assert (await refusal_of_run(bench, asyncio.CancelledError())).reason == "INTERNAL"


async def test_error_texts_are_redacted_and_cut(bench: Bench) -> None:
    """A credential inside an error never reaches the client, and endless text fits the trailers."""
    text = "vendor said: Authorization: Bearer S3CRETVALUE " + "字" * 10_000
    error = await refusal_of_run(bench, EngineError("INVALID_REQUEST", text, {"detail": "api_key=S3CRETVALUE"}))
    assert error.reason == "INVALID_REQUEST"
    assert "S3CRETVALUE" not in error.message + error.metadata["detail"]
    assert len(error.message.encode()) <= 1_000


async def test_the_deadline_seen_by_a_handler_is_the_one_the_client_set(bench: Bench) -> None:
    """A call with a timeout ends DEADLINE_EXCEEDED when its time is over, while the engine is still at work."""
    bench.runs.before_start.clear()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.engine.Run(question(), timeout=0.4).read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.3 < loop.time() - begun < TIMEOUT
    await bench.settle()


async def test_resume_streams_the_segment_its_answers_begin(bench: Bench) -> None:
    """What is malformed or unknown is told first; the stream begins after the last event and ends with its segment."""
    request = ResumeRequest(run_id="none")
    assert await _resume_code(bench, request) == grpc.StatusCode.INVALID_ARGUMENT
    request.decisions.add(interrupt_id="i", comment="x" * 10_000)
    assert await _resume_code(bench, request) == grpc.StatusCode.INVALID_ARGUMENT
    request.decisions[0].comment = ""
    request.decisions[0].remember = 9  # type: ignore[assignment]  # no value of the enum, as the wire allows
    assert await _resume_code(bench, request) == grpc.StatusCode.INVALID_ARGUMENT
    request.decisions[0].remember = RememberScope.REMEMBER_SCOPE_CALL
    assert await _resume_code(bench, request) == grpc.StatusCode.NOT_FOUND
    key = await bench.new_run()
    request.run_id = key.run_id
    assert await _resume_code(bench, request) == grpc.StatusCode.FAILED_PRECONDITION
    await bench.runs.park(key, InterruptItem(id="i"))
    call = bench.engine.Resume(request)
    assert dict(await call.initial_metadata())["dualclaw-run-id"] == key.run_id
    await bench.runs.write(key, delta("b"), done(), state=SUCCEEDED)
    assert [event.seq for message in [m async for m in call] for event in message.events] == [3, 4]
    assert await _resume_code(bench, request) == grpc.StatusCode.FAILED_PRECONDITION


async def _resume_code(bench: Bench, request: ResumeRequest) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.engine.Resume(request).read()
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


async def test_a_span_ends_once_with_ok(bench: Bench) -> None:
    """A stream that ends well leaves one span with code 0, and its run belongs to that span's trace."""
    call = bench.engine.Run(question())
    key_id = dict(await call.initial_metadata())["dualclaw-run-id"]
    trace = bench.runs.started[0][2]
    await bench.runs.write(RunKey("default", key_id), delta("a"), done(), state=SUCCEEDED)
    assert len([message async for message in call]) == 1
    span = await bench.span()
    assert span.attributes["rpc.grpc.status_code"] == 0
    assert trace == TraceParent(f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")


async def test_a_span_ends_once_with_the_code_of_an_abort_after_events(serve: Serve) -> None:
    """An abort after messages were sent is seen by client and span alike."""
    async with serve() as bench:
        key = await bench.new_run()
        await bench.runs.write(key, delta("a"))
        call = bench.engine.Attach(AttachRequest(run_id=key.run_id))
        await call.read()
        await bench.server.drain(0)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        assert (await bench.span()).attributes["rpc.grpc.status_code"] == 14


@pytest.mark.parametrize(("timeout", "code"), [(None, 1), (3, 4)])
async def test_a_span_ends_once_with_cancelled_or_deadline_exceeded(
    bench: Bench, timeout: float | None, code: int
) -> None:
    """A stream nobody reads and everybody leaves still ends its span, with the code the client has."""
    key = await bench.new_run()
    call = bench.engine.Attach(AttachRequest(run_id=key.run_id), timeout=timeout)
    await call.initial_metadata()
    if timeout is None:
        call.cancel()
    else:
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await bench.span()).attributes["rpc.grpc.status_code"] == code


async def test_a_unary_call_has_one_span_with_its_code(bench: Bench) -> None:
    """A refused read is a span with NOT_FOUND, in the trace its caller named."""
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with pytest.raises(grpc.aio.AioRpcError):
        await bench.engine.GetRun(
            GetRunRequest(run_id="none"), metadata=(("traceparent", f"00-{trace_id}-{span_id}-01"),)
        )
    span = await bench.span()
    assert span.attributes["rpc.grpc.status_code"] == 5
    assert f"{span.context.trace_id:032x}" == trace_id
    assert f"{span.parent.span_id:016x}" == span_id


async def test_cancel_returns_the_run(bench: Bench) -> None:
    """The unary call reaches the engine with the caller's tenant."""
    key = await bench.new_run()
    response = await bench.engine.Cancel(CancelRequest(run_id=key.run_id, reason="enough"))
    assert (response.run.id, response.run.state) == (key.run_id, RunState.RUN_STATE_RUNNING)
