"""Scenes of an engine: what is played alone, what is attached to, answered, cancelled and left."""

from typing import Final

from dualclaw import AttachRequest, CancelRequest, DisconnectPolicy, ListMessagesRequest, Run, RunOptions, RunState
from dualclaw_clients.conformance.plays import EDITED
from dualclaw_clients.conformance.stage import (
    APPROVE,
    EDIT,
    REJECT,
    RESPOND,
    BrokeOff,
    Player,
    Players,
    Stage,
    beside,
    conversation_of,
    decide,
    run_id_of,
)
from dualclaw_clients.engine_client import new_request_id

FINAL: Final = (RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_FAILED, RunState.RUN_STATE_CANCELLED)
LEFT_FOR: Final = 10.0
"""Seconds after which a run that nobody is attached to is cancelled, if its starter wanted that."""

MOST: Final = 50
"""Positions at which a run is attached to; it has a handful of events, or a few dozen."""


def is_final(run: Run) -> bool:
    """Say whether a run is at its end."""
    return run.state in FINAL


async def text(stage: Stage) -> None:
    """A run, again by the same request_id, and read from every position."""
    request = stage.question("text", request_id=new_request_id())
    start = await stage.stream("start", request)
    stage.story("start")
    run_id = run_id_of(start)
    conversation_id = await conversation_of(stage, start)
    await stage.stream("again", request)
    await stage.stream("reused", stage.question("tool", request_id=request.request_id))
    await stage.run("get", run_id)
    await stage.call("messages", ListMessagesRequest(conversation_id=conversation_id))
    end = len(start.events)
    for after in range(min(end + 1, MOST)):
        await stage.attach(f"after-{after}", run_id, after)
    await stage.attach("end", run_id, end)
    await stage.attach("end-wait", run_id, end, wait=True)
    await stage.attach("beyond", run_id, end + 1)
    await stage.attach("negative", run_id, -1)
    await stage.resume("not-parked", run_id, decide("pay-a", APPROVE))
    await stage.cancel("cancel-final", run_id)
    await stage.run("still", run_id)


async def alone(stage: Stage, scenario: str) -> None:
    """A run and nothing else."""
    await stage.ask("start", scenario)
    stage.story("start")


async def error(stage: Stage) -> None:
    """A run that fails."""
    start = await stage.ask("start", "error")
    stage.story("start")
    await stage.run("get", run_id_of(start))


async def loop(stage: Stage) -> None:
    """A limit that is lowered, and one that is raised."""
    for label, limit in ("start", 0), ("lowered", 2), ("raised", 99):
        options = RunOptions(max_steps=limit)
        await stage.stream(label, stage.question("loop", request_id=new_request_id(), options=options))
    stage.story("start")
    stage.story("lowered")


async def approve(stage: Stage) -> None:
    """An approval: what is refused while it waits, the answer, the answer again, and a client that waits for it all."""
    start = await stage.ask("start", "approval")
    run_id = run_id_of(start)
    conversation_id = await conversation_of(stage, start)
    await stage.run("parked", run_id)
    await stage.attach("parked-attach", run_id)
    await stage.attach("parked-end", run_id, len(start.events))
    await stage.stream("message", stage.question("text", conversation_id=conversation_id))
    await stage.resume("unknown", run_id, decide("no-such-question", APPROVE))
    await stage.resume("wrong-hash", run_id, decide("pay-a", APPROVE, args_hash="0" * 64))
    await stage.run("still-parked", run_id)
    async with stage.opened("waiting", AttachRequest(run_id=run_id, wait=True), len(start.events)) as waiting:
        request_id = new_request_id()
        await stage.resume("resume", run_id, decide("pay-a", APPROVE), request_id=request_id)
        await waiting.rest()
    stage.story("start", "resume")
    await stage.resume("resume-again", run_id, decide("pay-a", APPROVE), request_id=request_id)
    await stage.resume("twice", run_id, decide("pay-a", APPROVE))
    await stage.run("get", run_id)


async def reject(stage: Stage) -> None:
    """An approval that is rejected."""
    start = await stage.ask("start", "approval")
    await stage.resume("resume", run_id_of(start), decide("pay-a", REJECT))
    stage.story("start", "resume")


async def edit(stage: Stage) -> None:
    """An approval whose arguments are changed."""
    start = await stage.ask("start", "approval")
    await stage.resume("resume", run_id_of(start), decide("pay-a", EDIT, args_json=EDITED))
    stage.story("start", "resume")


async def partial(stage: Stage) -> None:
    """Two approvals: one answered, answered again, then the other one together with an unknown one, then alone."""
    start = await stage.ask("start", "approvals")
    run_id = run_id_of(start)
    await stage.resume("partial", run_id, decide("pay-a", APPROVE))
    await stage.resume("twice", run_id, decide("pay-a", REJECT))
    await stage.resume("not-all", run_id, decide("pay-b", APPROVE), decide("no-such-question", APPROVE))
    await stage.run("still-parked", run_id)
    await stage.resume("rest", run_id, decide("pay-b", REJECT))
    stage.story("start", "partial", "rest")
    await stage.run("get", run_id)
    await stage.resume("final", run_id, decide("pay-b", APPROVE))


async def question(stage: Stage) -> None:
    """A question that the next message of its conversation answers."""
    start = await stage.ask("start", "question")
    run_id = run_id_of(start)
    conversation_id = await conversation_of(stage, start)
    await stage.run("parked", run_id)
    await stage.stream("answer", stage.question("", text="blue", conversation_id=conversation_id))
    stage.story("start", "answer")


async def respond(stage: Stage) -> None:
    """A question that a decision answers."""
    start = await stage.ask("start", "question")
    await stage.resume("resume", run_id_of(start), decide("ask-1", RESPOND, response_json='"green"'))
    stage.story("start", "resume")


async def cancel(stage: Stage) -> None:
    """A run that is cancelled while it talks, with a second and a third client on it."""
    request = stage.question("slow", request_id=new_request_id())
    async with stage.opened("start", request, 4) as start:
        run_id = start.events[0].run_id
        if not run_id:
            raise BrokeOff("the first event has no run_id")
        async with beside() as begin:
            for after in (0, 2):
                begin(stage.attach(f"live-{after}", run_id, after))
            await start.until(lambda seen: len(seen) >= 8)
            await stage.cancel("cancel", run_id)
            await start.rest()
    stage.story("start")
    await stage.run("get", run_id)
    await stage.cancel("again", run_id)


async def cancel_parked(stage: Stage) -> None:
    """A run that is cancelled while it waits for people."""
    start = await stage.ask("start", "approval")
    run_id = run_id_of(start)
    await stage.cancel("cancel", run_id)
    end = await stage.attach("end", run_id, len(start.events), wait=True)
    if not end.late:
        stage.story("start", "end")
    await stage.run_once("get", run_id, is_final, stage.probe.timeout)


async def leave(stage: Stage) -> None:
    """A run whose starter leaves without a word about that."""
    async with stage.opened("start", stage.question("slow", request_id=new_request_id()), 3) as start:
        run_id = start.events[0].run_id
    seen = len(start.events)
    await stage.run_once("left", run_id, lambda run: run.last_seq >= seen + 10 or is_final(run), stage.probe.timeout)
    await stage.cancel("cancel", run_id)
    await stage.attach("whole", run_id, wait=True)
    stage.story("whole")


async def leave_cancel(stage: Stage) -> None:
    """A run that shall end when its starter leaves."""
    options = RunOptions(on_disconnect=DisconnectPolicy.DISCONNECT_POLICY_CANCEL)
    request = stage.question("steady", request_id=new_request_id(), options=options)
    async with stage.opened("start", request, 2) as start:
        run_id = start.events[0].run_id
    await stage.run_once("left", run_id, is_final, LEFT_FOR + 8)
    await stage.probe.call(CancelRequest(run_id=run_id))


def _alone(scenario: str) -> Player:
    async def play(stage: Stage) -> None:
        await alone(stage, scenario)

    return play


SCENES: Final[Players] = {
    "text": text,
    "tool": _alone("tool"),
    "args": _alone("args"),
    "rewind": _alone("rewind"),
    "long": _alone("long"),
    "error": error,
    "loop": loop,
    "approve": approve,
    "reject": reject,
    "edit": edit,
    "partial": partial,
    "question": question,
    "respond": respond,
    "cancel": cancel,
    "cancel-parked": cancel_parked,
    "leave": leave,
    "leave-cancel": leave_cancel,
}
