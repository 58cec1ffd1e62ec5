"""Calls of an MCP server's tools: at work, asking people in the middle, given up, lost.

Rules

- A call is at work at the server until it answers, its time is over, or whoever made it is cancelled; then the server
  is told. ``timeout`` is the longest silence: progress starts it anew, up to ``max_time`` altogether.
- A server that asks people suspends the call (``mcp_questions``). What becomes of it meanwhile depends on the
  protocol. Since 2026-07-28 the server has answered with its question and a state; both are saved with the run, and
  any process can go on. Before, the call stays open at the server and is held here, for ``hold_time``; the answer goes
  to it. When it is gone by then (a crash, a lost connection, too late), a tool that may be repeated is called
  again and given the answers as it asks; of one that may not, the outcome is unknown, as after any crash.
- Before 2026-07-28 a question over stdio does not say which call it belongs to. It belongs to the only one at work that
  does not wait for an answer already; if there are several, nobody is asked and the server is told so: a question must
  not reach people of another run.
- What went wrong is told by kind: nothing was sent (may be made again), the server refuses, the answer is no answer,
  the connection was lost in the middle (outcome unknown, unless the tool may be repeated).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from mcp import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    URL_ELICITATION_REQUIRED,
    CallToolResult,
    ElicitRequest,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    InputRequiredResult,
)
from pydantic import TypeAdapter, ValidationError

from dualclaw_server.engine.checkpoint import Question
from dualclaw_server.engine.hooks import stopped
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import Ask, Replace, Suspend
from dualclaw_server.engine.session import Values
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.tool import Effect, NotDone, ToolContext, ToolOutput, ToolRaised
from dualclaw_server.tools.mcp_life import Connection, Life
from dualclaw_server.tools.mcp_questions import NoQuestion, about, ask_of, key_of, reply_of
from dualclaw_server.tools.mcp_results import output_of
from dualclaw_server.tools.mcp_spec import Spec, Unreachable

log = logging.getLogger(__name__)

EXTRAS = "mcp_tools"
"""Where the state of suspended calls is kept in a run."""
MAX_ROUNDS = 10
"""Answers to one call in a row that ask for something."""
MAX_HELD = 100
"""Calls of one server that are held; one more and the oldest is given up."""
_BETWEEN_ROUNDS = 0.25
"""Seconds before a call is continued that asks for nothing but to be continued."""

_Result = CallToolResult | InputRequiredResult
_PARAMS: TypeAdapter[ElicitRequestParams] = TypeAdapter(ElicitRequestParams)
_current: contextvars.ContextVar[Running] = contextvars.ContextVar("mcp_call")


@dataclass(frozen=True, slots=True)
class Target:
    """A tool as it is called."""

    name: str
    at_server: str
    """Its name there."""
    effect: Effect
    texts: Texts
    """The engine's words in the agent's language."""


class Running:
    """A call that is open at the server."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.task: asyncio.Task[_Result]
        self.asked: asyncio.Queue[tuple[str, ElicitRequestParams, asyncio.Future[ElicitResult]]] = asyncio.Queue()
        self.waiting = 0
        """Questions of it that have no answer yet."""
        self.alive = asyncio.Event()
        """Set whenever the server has shown that it is at work."""
        self._seen: dict[str, int] = {}

    async def ask(self, params: ElicitRequestParams) -> ElicitResult:
        """Wait for the answer to a question of the server."""
        place = key_of(params, "")
        number = self._seen[place] = self._seen.get(place, 0) + 1
        reply: asyncio.Future[ElicitResult] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((key_of(params, str(number)), params, reply))
        self.waiting += 1
        try:
            return await reply
        finally:
            self.waiting -= 1
            self.alive.set()

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """The server reports that it gets on."""
        self.alive.set()


class Calls:
    """The calls of one server."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.connection = Connection(spec, self._elicited)
        self._at_work: set[Running] = set()
        self._held: dict[str, tuple[Running, asyncio.TimerHandle]] = {}

    async def call(self, target: Target, args: Mapping[str, object], context: ToolContext) -> ToolOutput:
        """Make a call, or go on with one that asked people, and return its result.

        Raises:
            Suspend: the server asks people.
            NotDone, ToolRaised, Replace: what went wrong.
        """
        state = Values(context.trace.checkpoint.extras, f"{EXTRAS}/")
        answers = about(context.trace, context.call_id)
        running = self._take_held(context.idempotency_key)
        if running is None and answers and context.call_id not in state and target.effect == "once":
            raise self._lost(target)
        try:
            output = output_of(self._spec, await self._result(target, args, context, running, answers))
        except Suspend:
            raise
        except Exception:
            state.delete(context.call_id)
            raise
        state.delete(context.call_id)
        return output

    async def _result(
        self,
        target: Target,
        args: Mapping[str, object],
        context: ToolContext,
        running: Running | None,
        answers: Mapping[str, Question],
    ) -> CallToolResult:
        state = Values(context.trace.checkpoint.extras, f"{EXTRAS}/")
        request_state, requests = _read(state.get(context.call_id))
        for _ in range(MAX_ROUNDS):
            if running is None:
                responses = self._responses(requests, answers)
                running = await self._start(target, args, responses, request_state)
            try:
                result = await self._follow(running, target, context, answers)
            except MCPError as error:
                if error.code != URL_ELICITATION_REQUIRED:
                    raise ToolRaised(self._spec.clean(f"the server refuses the call: {error.message}")) from None
                result, request_state, requests = None, None, _urls(error)
                if requests and not self._unanswered(requests, answers):
                    raise ToolRaised("the server asks again for what was done already") from None
            if isinstance(result, CallToolResult):
                return result
            if result is not None:
                request_state, requests = result.request_state, self._asked(result)
            running = None
            try:
                state.set(context.call_id, {"state": request_state, "requests": _written(requests)})
            except ValueError:
                raise ToolRaised("the server's question comes with more state than can be kept") from None
            if asks := self._unanswered(requests, answers):
                raise Suspend(*asks)
            if not requests:
                await asyncio.sleep(_BETWEEN_ROUNDS)
        raise ToolRaised(f"the server asked for more than {MAX_ROUNDS} times in one call")

    async def _start(
        self,
        target: Target,
        args: Mapping[str, object],
        responses: dict[str, ElicitResult],
        request_state: str | None,
    ) -> Running:
        try:
            life = await self.connection.life()
        except Unreachable as error:
            raise NotDone(f"MCP server {self._spec.name} cannot be reached: {error}") from None
        running = Running(life)
        token = _current.set(running)  # answers over HTTP come back in the context their request was made in
        try:
            running.task = asyncio.create_task(
                self._at_server(running, target, args, responses, request_state), name=f"mcp call {target.name}"
            )
        finally:
            _current.reset(token)
        self._at_work.add(running)
        running.task.add_done_callback(lambda _: self._at_work.discard(running))
        return running

    async def _at_server(
        self,
        running: Running,
        target: Target,
        args: Mapping[str, object],
        responses: dict[str, ElicitResult],
        request_state: str | None,
    ) -> _Result:
        life = running.life
        for attempt in (1, 2):
            try:
                return await life.client.result().session.call_tool(
                    target.at_server,
                    dict(args),
                    progress_callback=running.progress,
                    input_responses=dict(responses) or None,
                    request_state=request_state,
                    allow_input_required=True,
                )
            except MCPError as error:
                if attempt == 2:
                    raise
                if error.code == HEADER_MISMATCH:  # it has not run: the server wants the schema of its tool known
                    await life.client.result().session.list_tools()
                elif self._spec.url and error.code == INVALID_REQUEST and error.message == "Session terminated":
                    life.retire()  # nor has it here; the session had ended before
                    try:
                        running.life = life = await self.connection.life()
                    except Unreachable:
                        raise error from None
                else:
                    raise
        raise AssertionError("unreachable")

    async def _follow(
        self, running: Running, target: Target, context: ToolContext, answers: Mapping[str, Question]
    ) -> _Result:
        """Wait for what a call comes to. Raises Suspend when it asks people, MCPError when it is refused."""
        kept = False
        try:
            while not running.task.done():
                if not running.asked.empty():
                    key, params, reply = running.asked.get_nowait()
                    question = answers.get(key)
                    if question is None and not reply.done():
                        ask = ask_of(self._spec.name, params, key)
                        kept = True
                        self._hold(context.idempotency_key, running, (key, params, reply))
                        raise Suspend(ask)
                    if question is not None and not reply.done():
                        reply.set_result(reply_of(params, question))
                    continue
                await self._news(running, target)
            return running.task.result()
        except NoQuestion as error:
            raise ToolRaised(self._spec.clean(f"the server asks what cannot be asked: {error}")) from None
        except ValidationError:
            raise ToolRaised("the server's answer is no result of a tool call") from None
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise self._lost(target) from None
        except (RuntimeError, ValueError) as error:
            raise ToolRaised(self._spec.clean(str(error))) from None
        except asyncio.CancelledError as error:
            if stopped(error):
                raise
            raise self._lost(target) from None
        finally:
            if not kept:
                _give_up(running)

    async def _news(self, running: Running, target: Target) -> None:
        """Wait until something happens to a call. Raises Replace when nothing has for too long."""
        running.alive.clear()
        asked = asyncio.create_task(running.asked.get())
        alive = asyncio.create_task(running.alive.wait())
        try:
            done, _ = await asyncio.wait(
                {running.task, asked, alive}, timeout=self._spec.timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            alive.cancel()
            if asked.done() and not asked.cancelled():
                running.asked.put_nowait(asked.result())
            asked.cancel()
        if not done:
            summary = target.texts.tool_timeout.format(name=target.name, seconds=self._spec.timeout)
            raise Replace(failure("TOOL_TIMEOUT", summary, retryable=target.effect != "once"))

    def _lost(self, target: Target) -> Replace:
        """Return what became of a call whose connection ended in the middle of it."""
        detail = f"The connection to MCP server {self._spec.name} was lost while it was at work."
        if target.effect == "once":
            summary = target.texts.tool_outcome_unknown.format(name=target.name)
            return Replace(failure("TOOL_OUTCOME_UNKNOWN", summary, detail=detail))
        summary = target.texts.tool_failed.format(name=target.name)
        return Replace(failure("TOOL_FAILED", summary, detail=detail, retryable=True))

    # What the server asks people

    async def _elicited(self, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        """Have the call that a question belongs to ask people."""
        running = _current.get(None)
        if running is None or running not in self._at_work:
            free = [call for call in self._at_work if not call.waiting]
            if len(free) != 1:
                log.warning("MCP server %s asks people, and nobody can tell for which call", self._spec.name)
                return ErrorData(code=INTERNAL_ERROR, message="several calls are open; nobody was asked")
            running = free[0]
        return await running.ask(params)

    def _asked(self, result: InputRequiredResult) -> dict[str, ElicitRequestParams]:
        found = {}
        for key, request in (result.input_requests or {}).items():
            if not isinstance(request, ElicitRequest):
                raise ToolRaised(f"the server asks for {request.method}, which this engine does not offer")
            found[key] = request.params
        return found

    def _unanswered(self, requests: Mapping[str, ElicitRequestParams], answers: Mapping[str, Question]) -> list[Ask]:
        asks: dict[str, Ask] = {}
        try:
            for name, params in requests.items():
                if (key := key_of(params, name)) not in answers:
                    asks[key] = ask_of(self._spec.name, params, key)
        except NoQuestion as error:
            raise ToolRaised(self._spec.clean(f"the server asks what cannot be asked: {error}")) from None
        return list(asks.values())

    def _responses(
        self, requests: Mapping[str, ElicitRequestParams], answers: Mapping[str, Question]
    ) -> dict[str, ElicitResult]:
        keys = {name: key_of(params, name) for name, params in requests.items() if not name.startswith(_URL)}
        return {name: reply_of(requests[name], answers[key]) for name, key in keys.items() if key in answers}

    # Calls that wait for people

    def _hold(
        self,
        key: str,
        running: Running,
        question: tuple[str, ElicitRequestParams, asyncio.Future[ElicitResult]],
    ) -> None:
        running.asked.put_nowait(question)
        while len(self._held) >= MAX_HELD:
            self._expire(next(iter(self._held)))
        timer = running.life.loop.call_later(self._spec.hold_time, self._expire, key)
        self._held[key] = running, timer

    def _take_held(self, key: str) -> Running | None:
        held = self._held.pop(key, None)
        if held is None:
            return None
        running, timer = held
        timer.cancel()
        if running.life.over or (running.task.done() and not running.asked.empty()):
            _give_up(running)
            return None
        return running

    def _expire(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held[1].cancel()
            _give_up(held[0])

    async def aclose(self) -> None:
        """Give up every call and close the connection."""
        for key in list(self._held):
            self._expire(key)
        tasks = {running.task for running in self._at_work}
        for running in list(self._at_work):
            _give_up(running)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        await self.connection.aclose()


_URL = "url/"
"""Begins names of requests that came as an error: their answers are not sent, the call is simply made again."""


def _urls(error: MCPError) -> dict[str, ElicitRequestParams]:
    """Return the addresses that people have to visit before a call can be made."""
    data = error.data if isinstance(error.data, dict) else {}
    found: dict[str, ElicitRequestParams] = {}
    try:
        for number, given in enumerate(list(data.get("elicitations", ()))[:10]):
            found[f"{_URL}{number}"] = _PARAMS.validate_python(given)
    except (ValidationError, TypeError):
        raise ToolRaised("the server refuses the call, and does not say what is to be done first") from None
    if not found:
        raise ToolRaised("the server refuses the call, and does not say what is to be done first")
    return found


def _written(requests: Mapping[str, ElicitRequestParams]) -> dict[str, object]:
    return {name: params.model_dump(by_alias=True, mode="json") for name, params in requests.items()}


def _read(kept: object) -> tuple[str | None, dict[str, ElicitRequestParams]]:
    """Return the state of a call and what it asked, as they were saved."""
    if not isinstance(kept, dict):
        return None, {}
    return kept["state"], {name: _PARAMS.validate_python(params) for name, params in kept["requests"].items()}


def _give_up(running: Running) -> None:
    """End a call; the server is told by the SDK. Nobody waits for that."""
    task = running.task
    if not task.done():
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    elif not task.cancelled():
        task.exception()
