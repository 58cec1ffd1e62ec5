"""Answers every call of A2A from the engine: a task is a run, a context a conversation, a message_id a request_id.

- Nothing is kept here. A task is folded from its run's log whenever somebody asks, so any number of claws may stand
  beside each other, and a claw that was restarted knows every task.
- A stream begins with the task, at once. Its updates are those of the engine's stream, which is taken up again by
  itself when it is lost; the run goes on whether or not anybody reads.
- A message with a task's id answers what the task asks. Which message it was is remembered by the engine alone
  (request_id), so a message that is sent again after a lost answer gets the same segment, also when the task is over.
- A message in a context that is busy waits in line, as a task of its own.
- The caller's bearer key goes to the engine unchanged; the claw has no key to lend.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Final

from a2a.server.context import ServerCallContext
from a2a.server.events.event_queue import Event
from a2a.server.request_handlers.request_handler import RequestHandler, validate_request_params
from a2a.types import a2a_pb2
from a2a.types.a2a_pb2 import Task
from a2a.utils.errors import (
    InternalError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    UnsupportedOperationError,
)
from a2a.utils.task import apply_history_length, validate_history_length, validate_page_size

from dualclaw import BusyPolicy, InterruptItem, ListRunsRequest, Message, ResumeRequest, Role, Run, RunRequest, RunState
from dualclaw.errors import EngineError
from dualclaw_clients.a2a.card import Addresses, agent_card, find_agent
from dualclaw_clients.a2a.parts import check_output_modes, content_parts
from dualclaw_clients.a2a.questions import Unclear, read_answer
from dualclaw_clients.a2a.refusals import broken, told
from dualclaw_clients.a2a.task_view import STATES, TaskView, Update, is_final, merged, task_of
from dualclaw_clients.engine_client import EngineClient, RunStream

BEARER_STATE: Final = "dualclaw.bearer"
"""Key of a call's state under which its transport leaves the caller's bearer key."""
CANCEL_WAIT: Final = 10.0
"""Seconds a cancelled task is waited for; then it is told as it is."""
_LEAVING: Final = "this server is shutting down; the task goes on: subscribe to it again"
_ENDED: Final = "the engine ended the stream before the task's end; subscribe to the task to follow it"


class EngineTasks(RequestHandler):
    """A2A's operations over one engine.

    Args:
        engine: the connection; without a key of its own.
        addresses: where callers reach this claw, for the extended card.
        version: of the claw, for the extended card.
        agent: who answers when a caller names nobody; empty: the engine's default.
        max_streams: most calls that follow a run at a time.
    """

    def __init__(
        self, engine: EngineClient, addresses: Addresses, version: str, *, agent: str = "", max_streams: int = 1000
    ) -> None:
        self._engine = engine
        self._addresses = addresses
        self._version = version
        self._agent = agent
        self._max_streams = max_streams
        self._open: set[RunStream] = set()
        self._leaving = False

    @property
    def open_streams(self) -> int:
        """How many calls follow a run now."""
        return len(self._open)

    @property
    def is_leaving(self) -> bool:
        """Whether it shuts down."""
        return self._leaving

    async def close_streams(self) -> None:
        """End every call that follows a run, at once, and refuse later ones; the runs go on."""
        self._leaving = True
        for stream in tuple(self._open):
            await stream.close()

    @validate_request_params
    async def on_message_send_stream(
        self, params: a2a_pb2.SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Start or answer a task and follow it to where it ends or waits."""
        with told():
            async with self._started(params, context) as (task, stream, view):
                yield apply_history_length(task, params.configuration)
                if stream is not None:
                    async with aclosing(self._follow(stream, view)) as updates:
                        async for update in updates:
                            yield update

    @validate_request_params
    async def on_message_send(
        self, params: a2a_pb2.SendMessageRequest, context: ServerCallContext
    ) -> Task | a2a_pb2.Message:
        """Start or answer a task; returns it where it ends or waits, or at once if the caller wants that."""
        with told():
            async with self._started(params, context) as (begun, stream, view):
                task = begun
                if stream is not None and not params.configuration.return_immediately:
                    async with aclosing(self._follow(stream, view, leave_quietly=True)) as updates:
                        async for _ in updates:
                            pass
                    task = view.task()
                    task.history.extend(begun.history)
                return apply_history_length(task, params.configuration)

    @validate_request_params
    async def on_subscribe_to_task(
        self, params: a2a_pb2.SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Follow a task from where it stands to its end, over everything it waits for."""
        token = _bearer(context)
        with told():
            run = await self._engine.get_run(params.id, token=token)
            if is_final(run):
                raise UnsupportedOperationError(f"task {run.id} is at its end; get it instead")
            view = TaskView(run.id, run.conversation_id)
            async with self._reading(self._engine.attach(run.id, wait=True, token=token)) as stream:
                await self._catch_up(stream, view, run.last_seq)
                yield view.task() if run.last_seq else task_of(run)
                async with aclosing(self._follow(stream, view)) as updates:
                    async for update in updates:
                        yield update

    @validate_request_params
    async def on_get_task(self, params: a2a_pb2.GetTaskRequest, context: ServerCallContext) -> Task | None:
        """Return a task with its artifacts."""
        validate_history_length(params)
        with told():
            return await self._whole_task(await self._engine.get_run(params.id, token=_bearer(context)), context)

    @validate_request_params
    async def on_list_tasks(
        self, params: a2a_pb2.ListTasksRequest, context: ServerCallContext
    ) -> a2a_pb2.ListTasksResponse:
        """Return a page of tasks, the last created first; its total counts this page and whether there is more."""
        validate_history_length(params)
        if params.HasField("page_size"):
            validate_page_size(params.page_size)
        states = [state for state, told_as in STATES.items() if told_as == params.status]
        size = params.page_size or 50
        if params.status and not states:
            return a2a_pb2.ListTasksResponse(page_size=size)
        request = ListRunsRequest(
            page_size=size,
            page_token=params.page_token,
            states=states,  # type: ignore[arg-type]  # keys of STATES
            conversation_id=params.context_id,
        )
        with told():
            page = await self._engine.list_runs(request, token=_bearer(context))
            tasks = [
                await self._whole_task(run, context) if params.include_artifacts else task_of(run)
                for run in page.runs
                if _is_wanted(run, params)
            ]
        total = len(tasks) + bool(page.next_page_token)
        return a2a_pb2.ListTasksResponse(
            tasks=tasks, next_page_token=page.next_page_token, page_size=size, total_size=total
        )

    @validate_request_params
    async def on_cancel_task(self, params: a2a_pb2.CancelTaskRequest, context: ServerCallContext) -> Task | None:
        """Cancel a task and return it once it has ended."""
        token = _bearer(context)
        with told():
            run = await self._engine.get_run(params.id, token=token)
            if is_final(run):
                raise TaskNotCancelableError(f"task {run.id} is at its end")
            run = await self._engine.cancel(run.id, "cancelled over A2A", token=token)
            if not is_final(run):
                await self._await_end(run, token)
                run = await self._engine.get_run(run.id, token=token)
            return await self._whole_task(run, context)

    async def on_get_extended_agent_card(
        self, params: a2a_pb2.GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> a2a_pb2.AgentCard:
        """Return the card with the agent's tools."""
        with told():
            agent = await find_agent(self._engine, params.tenant or self._agent, token=_bearer(context))
        return agent_card(agent, self._addresses, self._version, tenant=params.tenant, extended=True)

    async def on_create_task_push_notification_config(
        self, params: a2a_pb2.TaskPushNotificationConfig, context: ServerCallContext
    ) -> a2a_pb2.TaskPushNotificationConfig:
        """Refuse: the card says that nothing is pushed."""
        raise PushNotificationNotSupportedError

    async def on_get_task_push_notification_config(
        self, params: a2a_pb2.GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> a2a_pb2.TaskPushNotificationConfig:
        """Refuse: the card says that nothing is pushed."""
        raise PushNotificationNotSupportedError

    async def on_list_task_push_notification_configs(
        self, params: a2a_pb2.ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> a2a_pb2.ListTaskPushNotificationConfigsResponse:
        """Refuse: the card says that nothing is pushed."""
        raise PushNotificationNotSupportedError

    async def on_delete_task_push_notification_config(
        self, params: a2a_pb2.DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        """Refuse: the card says that nothing is pushed."""
        raise PushNotificationNotSupportedError

    @asynccontextmanager
    async def _started(
        self, params: a2a_pb2.SendMessageRequest, context: ServerCallContext
    ) -> AsyncIterator[tuple[Task, RunStream | None, TaskView]]:
        """Have the engine take a message; gives the task at once, and the stream behind it if there is one."""
        message = params.message
        validate_history_length(params.configuration)
        check_output_modes(params.configuration)
        if params.configuration.HasField("task_push_notification_config"):
            raise PushNotificationNotSupportedError
        if message.role != a2a_pb2.ROLE_USER:
            raise InvalidParamsError("message.role must be ROLE_USER")
        token = _bearer(context)
        if message.task_id:
            async with self._answered(message, token) as answered:
                _with_history(answered[0], message)
                yield answered
            return
        request = RunRequest(
            agent=params.tenant or self._agent,
            conversation_id=message.context_id,
            request_id=request_id_of(message),
            message=Message(role=Role.ROLE_USER, parts=content_parts(message.parts)),
            claw="a2a",
            on_busy=BusyPolicy.BUSY_POLICY_QUEUE,
        )
        async with self._reading(self._engine.run(request, token=token)) as stream:
            view = TaskView(stream.run_id, stream.conversation_id or message.context_id)
            if message.context_id:  # it may have answered what a task of the context asks, and that task has a past
                run = await self._engine.get_run(stream.run_id, token=token)
                view = await self._folded(run, token)
                if not view.is_open and run.state in (RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_QUEUED):
                    view.goes_on()
            yield _with_history(view.task(), message), stream, view

    @asynccontextmanager
    async def _answered(
        self, message: a2a_pb2.Message, token: str
    ) -> AsyncIterator[tuple[Task, RunStream | None, TaskView]]:
        """Give a message to the task it names, as the answer to what the task asks."""
        run = await self._engine.get_run(message.task_id, token=token)
        if message.context_id and message.context_id != run.conversation_id:
            raise InvalidParamsError(f"task {run.id} is of context {run.conversation_id}, not of {message.context_id}")
        view = await self._folded(run, token)
        waits = run.state == RunState.RUN_STATE_INTERRUPTED
        items: Sequence[InterruptItem] = run.interrupts if waits else view.asked
        async with AsyncExitStack() as stack:
            try:
                decisions = read_answer(message.parts, items, view.ever_asked or {item.id for item in items})
                request = ResumeRequest(run_id=run.id, decisions=decisions, request_id=request_id_of(message))
                resuming = self._reading(self._engine.resume(request, token=token))
                stream = await stack.enter_async_context(resuming)
            except (Unclear, EngineError) as error:
                if isinstance(error, EngineError) and error.reason not in ("INVALID_REQUEST", "UNKNOWN_INTERRUPT"):
                    raise
                if not waits:
                    raise UnsupportedOperationError(
                        f"task {run.id} waits for no message; subscribe to it, or send the message without its id"
                    ) from None
                problem = error.message if isinstance(error, EngineError) else str(error)
                yield view.ask_again(run.interrupts, problem), None, view
                return
            yield (view.goes_on() if waits else view.task()), stream, view

    @asynccontextmanager
    async def _reading(self, stream: RunStream) -> AsyncIterator[RunStream]:
        """Open a stream of the engine, counted among the open ones."""
        if self._leaving:
            raise EngineError("OVERLOADED", "this server is shutting down", {"grpc_code": "UNAVAILABLE"})
        if len(self._open) >= self._max_streams:
            raise EngineError("OVERLOADED", f"this server has {self._max_streams} open streams", retry_after=1)
        self._open.add(stream)
        try:
            async with stream:
                yield stream
        finally:
            self._open.discard(stream)

    async def _follow(
        self, stream: RunStream, view: TaskView, *, leave_quietly: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Yield what a stream changes in a task; an end before the task's is an error, unless left quietly."""
        try:
            async with aclosing(stream.batches()) as batches:
                async for events in batches:
                    for update in merged(update for event in events for update in view.apply(event)):
                        yield update
        except EngineError as error:
            raise broken(error, view.run_id) from None
        if view.is_open and not leave_quietly:
            raise InternalError(_LEAVING if self._leaving else _ENDED)

    async def _catch_up(self, stream: RunStream, view: TaskView, last_seq: int) -> None:
        """Apply a stream's events at least up to a position; what came in one message with it is applied, too."""
        if last_seq:
            async with aclosing(stream.batches()) as batches:
                async for events in batches:
                    for event in events:
                        view.apply(event)
                    if view.last_seq >= last_seq:
                        break

    async def _folded(self, run: Run, token: str) -> TaskView:
        """Return a run's task as its log has it, exactly where the run stood; empty when the log is no longer kept."""
        view = TaskView(run.id, run.conversation_id)
        if not run.last_seq:
            return view
        try:
            async with (
                self._reading(self._engine.attach(run.id, token=token)) as stream,
                aclosing(stream.batches()) as batches,
            ):
                async for events in batches:
                    for event in events:
                        if event.seq <= run.last_seq:
                            view.apply(event)
                    if events[-1].seq >= run.last_seq:
                        break
        except EngineError as error:
            if error.reason != "LOG_COMPACTED":
                raise
        return view

    async def _whole_task(self, run: Run, context: ServerCallContext) -> Task:
        return task_of(run, (await self._folded(run, _bearer(context))).task())

    async def _await_end(self, run: Run, token: str) -> None:
        try:
            async with (
                asyncio.timeout(CANCEL_WAIT),
                self._reading(self._engine.attach(run.id, after_seq=run.last_seq, wait=True, token=token)) as stream,
            ):
                async for _ in stream:
                    pass
        except TimeoutError:
            pass


def request_id_of(message: a2a_pb2.Message) -> str:
    """Return the request_id of a message: the same whenever it is sent, and another in another task or context."""
    place = [message.context_id, message.task_id, message.message_id]
    return "a2a-" + hashlib.sha256(json.dumps(place).encode()).hexdigest()


def _bearer(context: ServerCallContext) -> str:
    return str(context.state.get(BEARER_STATE, ""))


def _with_history(task: Task, message: a2a_pb2.Message) -> Task:
    task.history.append(message)
    task.history[-1].task_id, task.history[-1].context_id = task.id, task.context_id
    return task


def _is_wanted(run: Run, params: a2a_pb2.ListTasksRequest) -> bool:
    if params.tenant and run.agent != params.tenant:
        return False
    after = params.status_timestamp_after
    return (run.update_time.seconds, run.update_time.nanos) >= (after.seconds, after.nanos)
