"""Scenes of a web gateway, by its native and by its original route."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.plays import EDITED
from dualclaw_clients.conformance.seen import Frame, HttpExchange, Scene
from dualclaw_clients.conformance.stage import BrokeOff
from dualclaw_clients.conformance.web_seen import events_of
from dualclaw_clients.engine_client import new_request_id

HEARTBEAT_WITHIN: Final = 20.0
"""Seconds of silence within which a heartbeat comes."""
NO_SUCH_ID: Final = "0190ffff-0000-7000-8000-00000000dead"
LATE: Final = 5.0
"""Seconds after which a first comment is a heartbeat."""
MOST: Final = 30
"""Positions at which a run is followed."""


class WebStage:
    """One scene's place: asks a gateway, and writes down."""

    def __init__(self, probe: HttpProbe, agent: str) -> None:
        self.probe = probe
        self.agent = agent
        self._http: dict[str, HttpExchange] = {}
        self._stories: list[tuple[str, ...]] = []

    def scene(self, name: str, broke_off: str = "") -> Scene:
        """Return what was written down."""
        return Scene(name, http=dict(self._http), stories=tuple(self._stories), broke_off=broke_off)

    def keep(self, label: str, exchange: HttpExchange) -> HttpExchange:
        """Write an exchange down."""
        self._http[label] = exchange
        return exchange

    def story(self, *labels: str) -> None:
        """Say that these streams, one after the other, are a run from its first event on."""
        self._stories.append(labels)

    async def send(
        self, label: str, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> HttpExchange:
        """Send a request, read the whole response, write it down."""
        return self.keep(label, await self.probe.send(method, path, body, headers))

    def request(self, scenario: str, **more: str) -> dict[str, object]:
        """Return the body of a native start."""
        message = {"role": "ROLE_USER", "parts": [{"text": f"conformance: {scenario}"}]}
        return {"agent": self.agent, "message": message, "request_id": new_request_id(), **more}

    async def start(self, label: str, scenario: str) -> HttpExchange:
        """Start a run by the native route and read its first segment."""
        return await self.send(label, "POST", "/v1/runs", self.request(scenario))

    async def follow(self, label: str, run_id: str, after: int, query: int | None = None) -> HttpExchange:
        """Follow a run from a position on, by Last-Event-ID, or by ``?after`` with ``query``, or by both."""
        path = events_path(run_id) + ("" if query is None else f"?after={query}")
        return await self.send(label, "GET", path, headers={"last-event-id": str(after)} if after >= 0 else {})

    async def resume(self, label: str, run_id: str, *decisions: Mapping[str, str], **more: str) -> HttpExchange:
        """Answer by the native route and read the next segment."""
        body = {"decisions": list(decisions), **more}
        return await self.send(label, "POST", f"/v1/runs/{quote(run_id, safe='')}/resume", body)

    async def say(self, label: str, text: str, **more: object) -> HttpExchange:
        """Say something on the original route and read what comes."""
        return await self.send(label, "POST", "/messages/stream", {"content": text, "agent": self.agent, **more})


def events_path(run_id: str) -> str:
    """Return the path under which a run is followed."""
    return f"/v1/runs/{quote(run_id, safe='')}/events"


def run_id_of(exchange: HttpExchange) -> str:
    """Return the id of a native stream's run. Raises BrokeOff."""
    for event in events_of(exchange.frames):
        if event.run_id:
            return event.run_id
    raise BrokeOff(f"{exchange.request} brought no event with a run_id; status {exchange.status}")


def conversation_of(exchange: HttpExchange) -> str:
    """Return the conversation a stream's done names. Raises BrokeOff."""
    for event in events_of(exchange.frames):
        if event.done.conversation_id:
            return event.done.conversation_id
    raise BrokeOff(f"{exchange.request} brought no done with a conversation_id; status {exchange.status}")


async def text(stage: WebStage) -> None:
    """A run, again by the same request_id, and followed from every position."""
    body = stage.request("text")
    start = await stage.send("start", "POST", "/v1/runs", body)
    stage.story("start")
    run_id = run_id_of(start)
    await stage.send("again", "POST", "/v1/runs", body)
    await stage.send("reused", "POST", "/v1/runs", {**stage.request("tool"), "request_id": str(body["request_id"])})
    end = len(events_of(start.frames))
    for after in range(min(end, MOST)):
        await stage.follow(f"after-{after}", run_id, after)
    await stage.follow("query", run_id, -1, query=1)
    await stage.follow("both", run_id, 2, query=0)
    await stage.follow("end", run_id, end)
    await stage.follow("beyond", run_id, end + 1)
    camel = {"agent": stage.agent, "message": body["message"], "requestId": new_request_id()}
    await stage.send("camel", "POST", "/v1/runs", camel)


async def native_approve(stage: WebStage) -> None:
    """An approval, with a client that waits over it in silence."""
    start = await stage.start("start", "approval")
    run_id = run_id_of(start)
    end = len(events_of(start.frames))
    async with stage.probe.open("GET", events_path(run_id), headers={"last-event-id": str(end)}) as waiting:
        stage.keep("head", waiting.head)
        decision = {"interruptId": "pay-a", "action": "DECISION_ACTION_APPROVE"}
        await stage.resume("resume", run_id, decision, requestId=(request_id := new_request_id()))
        stage.keep("waiting", await waiting.rest())
    stage.story("start", "resume")
    await stage.resume("resume-again", run_id, decision, request_id=request_id)
    await stage.resume("twice", run_id, decision)


async def silent(stage: WebStage) -> None:
    """A parked run that is followed until a heartbeat comes."""
    start = await stage.start("start", "approval")
    run_id = run_id_of(start)
    end = len(events_of(start.frames))
    began = time.monotonic()

    def beats(frames: Sequence[Frame]) -> bool:
        # One comment at the start is usual and no heartbeat: that is a second one, or one that comes late.
        comments = sum(frame.comment for frame in frames)
        return comments > 1 or (comments > 0 and time.monotonic() - began > LATE)

    async with stage.probe.open("GET", events_path(run_id), headers={"last-event-id": str(end)}) as quiet:
        stage.keep("head", quiet.head)
        heard = await quiet.until(beats, min(HEARTBEAT_WITHIN, stage.probe.timeout))
        if heard or quiet.leave().late:  # else it ended by itself, which others judge
            stage.keep("heard" if heard else "unheard", quiet.leave())
    await stage.send("cancel", "POST", f"/v1/runs/{quote(run_id, safe='')}/cancel", {})


async def native_answer(stage: WebStage, action: str, **more: str) -> None:
    """An approval that is answered in another way."""
    start = await stage.start("start", "approval")
    decision = {"interrupt_id": "pay-a", "action": f"DECISION_ACTION_{action}", **more}
    await stage.resume("resume", run_id_of(start), decision)
    stage.story("start", "resume")


async def native_question(stage: WebStage) -> None:
    """A question that the next message answers."""
    start = await stage.start("start", "question")
    body = stage.request("", conversation_id=conversation_of(start))
    body["message"] = {"role": "ROLE_USER", "parts": [{"text": "blue"}]}
    await stage.send("answer", "POST", "/v1/runs", body)
    stage.story("start", "answer")


async def native_cancel(stage: WebStage) -> None:
    """A run that is cancelled while it talks."""
    async with stage.probe.open("POST", "/v1/runs", stage.request("slow")) as start:
        if not await start.until(lambda frames: len(events_of(frames)) >= 3):
            stage.keep("start", start.leave())
            raise BrokeOff("the run ended, or was silent, before its event 3")
        run_id = events_of(start.frames)[0].run_id
        await stage.send("cancel", "POST", f"/v1/runs/{quote(run_id, safe='')}/cancel", {"reason": "conformance"})
        stage.keep("start", await start.rest())
    stage.story("start")


async def native_leave(stage: WebStage) -> None:
    """A run whose starter leaves, looked at a while later."""
    async with stage.probe.open("POST", "/v1/runs", stage.request("slow")) as start:
        enough = await start.until(lambda frames: len(events_of(frames)) >= 3)
        stage.keep("start", start.leave())
    if not enough:
        raise BrokeOff("the run ended, or was silent, before its event 3")
    run_id = run_id_of(start.leave())
    async with stage.probe.open("GET", events_path(run_id)) as later:
        await later.until(lambda frames: len(events_of(frames)) >= 15)
        stage.keep("later", later.leave())
    await stage.send("cancel", "POST", f"/v1/runs/{quote(run_id, safe='')}/cancel", {})


async def native_refusals(stage: WebStage) -> None:
    """Requests that have to be refused."""
    await stage.send("agent", "POST", "/v1/runs", {**stage.request("text"), "agent": "no-such-agent"})
    await stage.send("conversation", "POST", "/v1/runs", stage.request("text", conversation_id=NO_SUCH_ID))
    await stage.send("no-json", "POST", "/v1/runs", b"{")
    await stage.send("unknown-key", "POST", "/v1/runs", {**stage.request("text"), "colour": "blue"})
    await stage.send("no-message", "POST", "/v1/runs", {"agent": stage.agent})
    await stage.follow("run", NO_SUCH_ID, 0)
    await stage.resume("resume", NO_SUCH_ID, {"interrupt_id": "x", "action": "DECISION_ACTION_APPROVE"})
    await stage.send("cancel", "POST", f"/v1/runs/{NO_SUCH_ID}/cancel", {})


async def original_approve(stage: WebStage) -> None:
    """An approval on the original route, and a message that does not answer it."""
    start = await stage.say("start", "conformance: approval")
    stage.story("start")
    await stage.say("message", "yes", conversation_id=conversation_of(start))


async def original_question(stage: WebStage) -> None:
    """A question that the next message answers."""
    start = await stage.say("start", "conformance: question")
    await stage.say("answer", "blue", conversation_id=conversation_of(start))
    stage.story("start", "answer")


async def original_refusals(stage: WebStage) -> None:
    """What cannot be done."""
    await stage.send("no-json", "POST", "/messages/stream", b"{")
    await stage.say("empty", "")
    await stage.send("agent", "POST", "/messages/stream", {"content": "hi", "agent": "no-such-agent"})
    await stage.say("conversation", "conformance: text", conversation_id=NO_SUCH_ID)
    await stage.say("integer", "conformance: text", conversation_id=4_242)


WebPlayer = Callable[[WebStage], Awaitable[None]]


def _native(scenario: str) -> WebPlayer:
    async def play(stage: WebStage) -> None:
        await stage.start("start", scenario)
        stage.story("start")

    return play


def _original(scenario: str) -> WebPlayer:
    async def play(stage: WebStage) -> None:
        await stage.say("start", f"conformance: {scenario}")
        stage.story("start")

    return play


NATIVE_SCENES: Final[Mapping[str, WebPlayer]] = {
    "text": text,
    **{name: _native(name) for name in ("tool", "args", "rewind", "long", "error", "loop")},
    "approve": native_approve,
    "silent": silent,
    "reject": lambda stage: native_answer(stage, "REJECT"),
    "edit": lambda stage: native_answer(stage, "EDIT", args_json=EDITED),
    "question": native_question,
    "cancel": native_cancel,
    "leave": native_leave,
    "refusals": native_refusals,
}
ORIGINAL_SCENES: Final[Mapping[str, WebPlayer]] = {
    **{name: _original(name) for name in ("text", "tool", "args", "rewind", "long", "error", "loop")},
    "approve": original_approve,
    "question": original_question,
    "refusals": original_refusals,
}
