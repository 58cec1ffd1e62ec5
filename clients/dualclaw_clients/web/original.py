"""The original route, byte for byte what today's front-ends read: ``POST /messages/stream``.

Nothing but frames goes out: no id or event line, no comment, no heartbeat. Whatever goes wrong is one ``error``
frame under status 200, because these front-ends look nowhere else. Only what never was a request to this route
(a foreign host or origin, a body above the limit) is refused by its HTTP status.

A message answers the one question a conversation may wait for. It never answers an approval; these front-ends
know neither, so a message that cannot be taken is told in words what waits and where to decide.
"""

import contextlib
import logging
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from dualclaw import EngineEvent, Run, RunState
from dualclaw.errors import EngineError, diagnosis_code
from dualclaw.events import make_diagnosis, make_error
from dualclaw_clients.adapters import SseAdapter
from dualclaw_clients.engine_client import EngineClient, RunStream
from dualclaw_clients.web.access import bearer_token
from dualclaw_clients.web.bodies import original_request, parse_query, read_body
from dualclaw_clients.web.native import CLAW
from dualclaw_clients.web.replies import internal_error, told
from dualclaw_clients.web.streams import Streams

LOG = logging.getLogger(__name__)

RETRYABLE = frozenset({"STORE_UNAVAILABLE", "OVERLOADED", "QUOTA_EXCEEDED", "CONVERSATION_BUSY", "SLOW_CLIENT"})
"""Reasons after which the same question may work if it is asked again."""


class OriginalRoute:
    """The endpoint of the original route."""

    def __init__(self, engine: EngineClient, streams: Streams, body_limit: int) -> None:
        self._engine = engine
        self._streams = streams
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /messages/stream: start a run from ``{"content", ...}`` and stream its original frames."""
        body = await read_body(scope, receive, self._body_limit)
        adapter = SseAdapter()
        token = ""
        sink = self._streams.sink(scope, receive, send, heartbeat=False)
        if sink.ending != "shutdown":
            async with sink:
                await sink.open()
                try:
                    token = bearer_token(scope)
                    async with self._start(scope, body, token) as stream:
                        body = b""  # it may be long, and the stream may be open for long
                        while events := await stream.next_batch():
                            data = adapter.encode(events)
                            del events  # the next ones may be long in coming
                            if stream.ended:
                                await sink.end(data)
                            elif data:
                                await sink.write(data)
                except EngineError as error:
                    await sink.end(adapter.encode([failure_event(await self._explained(error, token))]))
                except Exception:
                    LOG.exception("a stream of the original route failed")
                    await sink.end(adapter.encode([failure_event(internal_error())]))
        if sink.ending == "complete":
            await sink.end()
        elif sink.ending == "shutdown":
            gone = EngineError("STORE_UNAVAILABLE", "the gateway is shutting down; the run goes on")
            if not sink.opened:
                await sink.open()
            await sink.end(adapter.encode([failure_event(gone)]))

    def _start(self, scope: Scope, body: bytes, token: str) -> RunStream:
        parse_query(scope, {})
        request = original_request(body)
        request.claw = CLAW
        return self._engine.run(request, token=token)

    async def _explained(self, error: EngineError, token: str) -> EngineError:
        """Return the refusal of a start; if the conversation waits for people, one that says what they must do."""
        run_id = error.metadata.get("run_id", "")
        if error.reason != "CONVERSATION_BUSY" or not run_id:
            return error
        with contextlib.suppress(EngineError):  # the refusal itself matters more
            run = await self._engine.get_run(run_id, token=token)
            if run.state == RunState.RUN_STATE_INTERRUPTED:
                return waiting(run)
        return error


def waiting(run: Run) -> EngineError:
    """Return the refusal of a message to a conversation that waits for people."""
    asked = "; ".join(item.prompt or item.tool_name for item in run.interrupts)
    hint = (
        f"Open the conversation on the chat page (/#{quote(run.conversation_id, safe='')}), or POST "
        f"/v1/runs/{quote(run.id, safe='')}/resume; then send the message again."
    )
    text = f"the conversation waits for a decision first: {asked}. {hint}"
    return EngineError("CONVERSATION_BUSY", text, {"run_id": run.id, "hint": hint, "waits": "people"})


def failure_event(error: EngineError) -> EngineEvent:
    """Return the ``error`` event that tells a failure outside the run; its diagnosis code is the reason's."""
    error = told(error)
    diagnosis = make_diagnosis(
        code=diagnosis_code(error.reason),
        severity="error",
        summary=error.message,
        hint=error.hint,
        retryable=error.retry_after is not None or (error.reason in RETRYABLE and "waits" not in error.metadata),
    )
    return make_error(error.message, diagnosis=diagnosis, claw=CLAW)
