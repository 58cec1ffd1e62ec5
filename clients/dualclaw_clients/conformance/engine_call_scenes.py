"""Scenes of an engine: busy conversations, refusals, lists, sizes, other tenants, and a crash."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Final

from dualclaw import (
    AttachRequest,
    BusyPolicy,
    CancelRequest,
    ContentPart,
    GetAgentRequest,
    GetAgentResponse,
    GetConversationRequest,
    GetRunRequest,
    GetRunResponse,
    ListConversationsRequest,
    ListMessagesRequest,
    ListRunsRequest,
    ListRunsResponse,
    Message,
    ResumeRequest,
    Role,
    RunOptions,
    RunRequest,
    SetInterceptorEnabledRequest,
)
from dualclaw_clients.conformance.engine_scenes import is_final
from dualclaw_clients.conformance.seen import Exchange
from dualclaw_clients.conformance.stage import (
    APPROVE,
    POLL,
    BrokeOff,
    Players,
    Stage,
    beside,
    conversation_of,
    decide,
    run_id_of,
)
from dualclaw_clients.engine_client import new_request_id

QUEUED: Final = 8
"""Runs that may wait in one conversation."""
NO_SUCH_ID: Final = "0190ffff-0000-7000-8000-00000000dead"
NO_PAGE: Final = "\u00a7no-such-page"
LARGE: Final = 40 * 1024 * 1024
"""Bytes of a request that no engine has to take."""


async def busy(stage: Stage) -> None:
    """Messages to a conversation whose run is talking: refused, in line, too many in line, one that replaces all."""
    async with AsyncExitStack() as open_streams:
        active = await open_streams.enter_async_context(
            stage.opened("active", stage.question("slow", request_id=new_request_id()), 2)
        )
        run_id = active.events[0].run_id
        conversation_id = (await _conversation(stage, run_id)) or "?"
        await stage.stream("rejected", stage.question("text", conversation_id=conversation_id))
        queue = [
            stage.question(
                "text",
                conversation_id=conversation_id,
                request_id=new_request_id(),
                on_busy=BusyPolicy.BUSY_POLICY_QUEUE,
            )
            for _ in range(QUEUED)
        ]
        async with beside() as begin:
            waiting: list[asyncio.Task[Exchange]] = []
            for request in queue:  # one after the other, so that their order is known
                waiting.append(begin(stage.probe.stream(request)))
                await stage.runs_in("queued", conversation_id, len(waiting) + 1, waiting[-1])
            await stage.stream(
                "overloaded",
                stage.question("text", conversation_id=conversation_id, on_busy=BusyPolicy.BUSY_POLICY_QUEUE),
            )
            replace = stage.question(
                "text",
                conversation_id=conversation_id,
                request_id=new_request_id(),
                on_busy=BusyPolicy.BUSY_POLICY_REPLACE,
            )
            await stage.stream("replacing", replace)
            await active.rest()
            for number, task in enumerate(waiting):
                stage.keep(f"waiting-{number}", await task)
    stage.story("active")
    stage.story("replacing")


async def queue(stage: Stage) -> None:
    """Two messages in line behind a run that is then cancelled."""
    async with stage.opened("active", stage.question("slow", request_id=new_request_id()), 2) as active:
        run_id = active.events[0].run_id
        conversation_id = await _conversation(stage, run_id)
        async with beside() as begin:
            for place, label in enumerate(("first", "second"), 2):
                request = stage.question(
                    "text",
                    conversation_id=conversation_id,
                    request_id=new_request_id(),
                    on_busy=BusyPolicy.BUSY_POLICY_QUEUE,
                )
                await stage.runs_in("waiting", conversation_id, place, begin(stage.stream(label, request)))
            await stage.call("cancel", CancelRequest(run_id=run_id))
            await active.rest()
    stage.story("first")
    stage.story("second")
    await stage.runs_in("after", conversation_id, 3)


async def refusals(stage: Stage) -> None:
    """Calls that have to be refused."""
    agent, probe = stage.cast.agent, stage.probe
    hello = Message(role=Role.ROLE_USER, parts=[ContentPart(text="conformance: text")])
    await stage.stream("agent", RunRequest(agent="no-such-agent", message=hello))
    await stage.stream("conversation", stage.question("text", conversation_id=NO_SUCH_ID))
    await stage.call("get-conversation", GetConversationRequest(conversation_id=NO_SUCH_ID))
    await stage.call("messages", ListMessagesRequest(conversation_id=NO_SUCH_ID))
    await stage.call("get", GetRunRequest(run_id=NO_SUCH_ID))
    await stage.stream("attach", AttachRequest(run_id=NO_SUCH_ID))
    await stage.call("cancel", CancelRequest(run_id=NO_SUCH_ID))
    await stage.stream("resume", ResumeRequest(run_id=NO_SUCH_ID, decisions=[decide("x", APPROVE)]))
    await stage.call("get-agent", GetAgentRequest(agent="no-such-agent"))
    await stage.stream("no-message", RunRequest(agent=agent))
    assistant = Message(role=Role.ROLE_ASSISTANT, parts=hello.parts)
    await stage.stream("assistant", RunRequest(agent=agent, message=assistant))
    await stage.stream("long-request-id", stage.question("text", request_id="x" * 257))
    await stage.stream("model", stage.question("text", options=RunOptions(model="no-such-model")))
    await stage.call("no-run-id", GetRunRequest())
    await stage.call("page-size", ListRunsRequest(page_size=-1))
    await stage.call("page-token", ListRunsRequest(page_token=NO_PAGE))
    stage.keep("no-proto", await probe.send(GetRunRequest(), b"\xff\xff"))
    await stage.stream("long-agent", RunRequest(agent="x" * 50_000, message=hello))
    known = await stage.call("known", GetAgentRequest(agent=agent))
    if isinstance(known.response, GetAgentResponse):
        locked = [info.name for info in known.response.agent.interceptors if not info.switchable]
        if locked:
            options = RunOptions(interceptors={locked[0]: False})
            await stage.stream("switch", stage.question("text", options=options))
            await stage.call("switch-for-all", SetInterceptorEnabledRequest(agent=agent, interceptor=locked[0]))


async def pages(stage: Stage) -> None:
    """Three runs of a conversation, listed in pages."""
    first = await stage.ask("run-0", "text")
    conversation_id = await conversation_of(stage, first)
    for number in (1, 2):
        request = stage.question("text", conversation_id=conversation_id, request_id=new_request_id())
        await stage.stream(f"run-{number}", request)
    token = ""
    for number in range(4):  # one more than there are, for a server whose pages never end
        request_ = ListRunsRequest(conversation_id=conversation_id, page_size=1, page_token=token)
        page = await stage.call(f"page-{number}", request_)
        token = page.response.next_page_token if isinstance(page.response, ListRunsResponse) else ""
        if not token:
            break
    for label, size in ("default", 0), ("huge", 100_000):
        await stage.call(label, ListRunsRequest(conversation_id=conversation_id, page_size=size))
    await stage.call("messages", ListMessagesRequest(conversation_id=conversation_id))


async def sizes(stage: Stage) -> None:
    """A request larger than any engine takes, then an ordinary one."""
    await stage.stream("large", stage.question("", text="x" * LARGE))
    await stage.ask("after", "text")
    stage.story("after")


async def keys(stage: Stage) -> None:
    """Callers without a key, and with one that does not exist."""
    for label, key in ("none", ""), ("wrong", "no-such-key"):
        async with stage.probe.as_caller(key) as probe:
            stage.keep(label, await probe.call(GetRunRequest(run_id=NO_SUCH_ID)))
            stage.keep(f"{label}-run", await probe.stream(stage.question("text")))


async def tenants(stage: Stage) -> None:
    """A run of one tenant, seen by another one."""
    request = stage.question("approval", request_id=new_request_id())
    start = await stage.stream("start", request)
    run_id = run_id_of(start)
    conversation_id = await conversation_of(stage, start)
    async with stage.probe.as_caller(stage.cast.other_key) as other:
        stage.keep("get", await other.call(GetRunRequest(run_id=run_id)))
        stage.keep("attach", await other.stream(AttachRequest(run_id=run_id)))
        stage.keep("cancel", await other.call(CancelRequest(run_id=run_id)))
        answer = ResumeRequest(run_id=run_id, decisions=[decide("pay-a", APPROVE)])
        stage.keep("resume", await other.stream(answer))
        stage.keep("messages", await other.call(ListMessagesRequest(conversation_id=conversation_id)))
        joined = stage.question("text", conversation_id=conversation_id, on_busy=BusyPolicy.BUSY_POLICY_REPLACE)
        stage.keep("join", await other.stream(joined))
        stage.keep("list", await other.call(ListRunsRequest(page_size=500)))
        stage.keep("conversations", await other.call(ListConversationsRequest(page_size=500)))
        stage.keep("same-request-id", await other.stream(request))
    await stage.run("still-parked", run_id)
    await stage.call("own-list", ListRunsRequest(page_size=500))


async def crash(stage: Stage) -> None:
    """A server that is killed while one run talks, one waits for people and one is over."""
    restart = stage.cast.restart
    if restart is None:
        raise BrokeOff("there is no --restart")
    final = await stage.ask("final", "text")
    parked = await stage.ask("parked", "approval")
    final_id, parked_id = run_id_of(final), run_id_of(parked)
    request = stage.question("slow", request_id=new_request_id())
    async with stage.opened("talking", request, 5) as talking:
        run_id = talking.events[0].run_id
        await restart()
        await talking.rest()
    until = time.monotonic() + stage.probe.timeout
    while await _is_away(stage, run_id):
        if time.monotonic() > until:
            raise BrokeOff("the server did not come back after --restart")
        await asyncio.sleep(POLL)
    await stage.attach("final-again", final_id)
    await stage.attach("parked-again", parked_id)
    await stage.resume("resume", parked_id, decide("pay-a", APPROVE))
    await stage.attach("whole", run_id, wait=True)
    await stage.run_once("get", run_id, is_final, stage.probe.timeout)
    await stage.stream("again", request)
    stage.story("final-again")
    stage.story("parked", "resume")
    stage.story("whole")


async def _is_away(stage: Stage, run_id: str) -> bool:
    status = (await stage.probe.call(GetRunRequest(run_id=run_id))).status
    return status is None or status.code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


async def _conversation(stage: Stage, run_id: str) -> str:
    seen: Exchange = await stage.probe.call(GetRunRequest(run_id=run_id))
    if not isinstance(seen.response, GetRunResponse) or not seen.response.run.conversation_id:
        raise BrokeOff(f"GetRun of {run_id or 'a run without id'} names no conversation")
    return seen.response.run.conversation_id


SCENES: Final[Players] = {
    "busy": busy,
    "queue": queue,
    "refusals": refusals,
    "pages": pages,
    "sizes": sizes,
    "keys": keys,
    "tenants": tenants,
    "crash": crash,
}
