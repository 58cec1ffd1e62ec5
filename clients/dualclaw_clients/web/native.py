"""The native routes: start, follow and resume a run as SSE with all seven events, and cancel it.

Ids of events are their seq, so a client that reconnects with ``Last-Event-ID`` gets exactly the events after it,
however often it asks. A start is refused with JSON under its HTTP status; once it was accepted nothing but
events, comments and the end of the response follows. An end without a terminal event means "this response was
lost": the client follows the run at ``/v1/runs/{id}/events``.
"""

import logging

from starlette.types import Receive, Scope, Send

from dualclaw import CancelRequest, CancelResponse, ResumeRequest, RunRequest, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw_clients.adapters import NativeSseAdapter
from dualclaw_clients.engine_client import EngineClient, RunStream
from dualclaw_clients.web.access import bearer_token
from dualclaw_clients.web.bodies import parse_count, parse_message, parse_object, parse_query, read_body
from dualclaw_clients.web.replies import HttpRefusal, send_empty, send_error, send_message
from dualclaw_clients.web.streams import Streams

LOG = logging.getLogger(__name__)

CLAW = "web"
FINAL = frozenset({RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_FAILED, RunState.RUN_STATE_CANCELLED})
FIRST = b": ok\n\n"
"""Sent with the headers, so that proxies and readers see the stream begin at once."""


class NativeRoutes:
    """Endpoints under ``/v1/runs`` that stream or act on one run."""

    def __init__(self, engine: EngineClient, streams: Streams, body_limit: int) -> None:
        self._engine = engine
        self._streams = streams
        self._body_limit = body_limit

    async def start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/runs: start a run; the body is protobuf JSON of RunRequest."""
        token = bearer_token(scope)
        parse_query(scope, {})
        request = parse_message(RunRequest(), parse_object(await read_body(scope, receive, self._body_limit)))
        request.claw = CLAW
        stream = self._engine.run(request, token=token)
        del request  # the stream has a copy
        await self._stream(scope, receive, send, stream)

    async def resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/runs/{run_id}/resume: answer an interrupted run; the body is protobuf JSON of ResumeRequest."""
        token = bearer_token(scope)
        request = ResumeRequest()
        await self._read_with_run_id(scope, receive, request)
        stream = self._engine.resume(request, token=token)
        del request  # as in ``start``
        await self._stream(scope, receive, send, stream)

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/runs/{run_id}/events: follow a run from ``Last-Event-ID`` (or ``?after=``) on until it is final.

        A final run with nothing left is 204, which tells an EventSource to stop.
        """
        token = bearer_token(scope)
        query = parse_query(scope, {"after": False})
        last = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1").strip()
        after = parse_count(last, "Last-Event-ID") if last else parse_count(query.get("after", ["0"])[0], "after")
        run_id = scope["path_params"]["run_id"]
        run = await self._engine.get_run(run_id, token=token)
        if run.state in FINAL and run.last_seq == after:
            await send_empty(scope, send, 204, ((b"x-run-id", run_id.encode()),))
            return
        stream = self._engine.attach(run_id, after_seq=after, wait=True, token=token)
        await self._stream(scope, receive, send, stream)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/runs/{run_id}/cancel: ask a run to end; the body, if any, is protobuf JSON of CancelRequest."""
        token = bearer_token(scope)
        request = CancelRequest()
        await self._read_with_run_id(scope, receive, request)
        run = await self._engine.cancel(request.run_id, request.reason, token=token)
        await send_message(scope, send, CancelResponse(run=run))

    async def _read_with_run_id(self, scope: Scope, receive: Receive, request: ResumeRequest | CancelRequest) -> None:
        """Fill a request about one run from its body; the path names the run, and the body may not name another."""
        run_id = scope["path_params"]["run_id"]
        body = await read_body(scope, receive, self._body_limit)
        if body.strip():
            parse_message(request, parse_object(body))
        if request.run_id not in {"", run_id}:
            raise FieldError({"run_id": "differs from the run the path names"})
        request.run_id = run_id

    async def _stream(self, scope: Scope, receive: Receive, send: Send, stream: RunStream) -> None:
        refusal: EngineError | None = None
        sink = self._streams.sink(scope, receive, send, heartbeat=True)
        if sink.ending != "shutdown":
            async with sink:
                try:
                    encode = NativeSseAdapter().encode
                    async with stream:
                        await sink.open(((b"x-run-id", stream.run_id.encode()),), FIRST)
                        while events := await stream.next_batch():
                            data = encode(events)
                            del events  # the next ones may be long in coming
                            if stream.ended:
                                await sink.end(data)
                            elif data:
                                await sink.write(data)
                except EngineError as error:
                    refusal = error
        if sink.ending in {"left", "stalled"}:
            return
        if sink.opened:
            if refusal is not None:
                LOG.warning("stream of run %s lost: %s", stream.run_id, refusal.message)
            await sink.end()
        elif refusal is not None:
            await send_error(scope, send, refusal)
        else:
            hint = "Try again in a moment, a start with the same request_id."
            gone = HttpRefusal(503, "STORE_UNAVAILABLE", "the gateway is shutting down", hint=hint)
            await send_error(scope, send, gone)
