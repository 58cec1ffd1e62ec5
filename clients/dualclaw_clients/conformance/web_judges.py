"""Judges of a web gateway: HTTP, and the rules of streams as far as a route carries them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dualclaw import EngineEvent
from dualclaw_clients.conformance import frame_judges
from dualclaw_clients.conformance.frame_judges import event_streams, events_in
from dualclaw_clients.conformance.plays import ARGS, ARGS_ESCAPED, PLAYS
from dualclaw_clients.conformance.seen import Evidence, HttpExchange, last, short, text_of
from dualclaw_clients.conformance.stream_judges import RULE_JUDGES, Judge, named, rule
from dualclaw_clients.conformance.web_seen import events_of, lifted, parse


def headers(evidence: Evidence) -> Iterator[str]:
    """The head of a stream."""
    kind = evidence.http("text", "start").headers.get("content-type", "")
    if kind.split(";")[0].strip() != "text/event-stream":
        yield f"text/start: Content-Type text/event-stream is expected; seen {kind!r}"
    for where, exchange in event_streams(evidence):
        head = exchange.headers
        control = {part.strip() for part in head.get("cache-control", "").split(",")}
        if not {"no-cache", "no-transform"} <= control:
            yield f"{where}: Cache-Control no-cache, no-transform is expected; seen {head.get('cache-control')!r}"
        if head.get("x-accel-buffering") != "no":
            yield f"{where}: X-Accel-Buffering no is expected; seen {head.get('x-accel-buffering')!r}"
        if "content-encoding" in head:
            yield f"{where}: no Content-Encoding is expected; seen {head['content-encoding']!r}"


def _same(where: str, exchange: HttpExchange, expected: Sequence[EngineEvent]) -> Iterator[str]:
    yield from _ended(where, exchange)
    seen = events_of(exchange.frames)
    for place, (one, wanted) in enumerate(zip(seen, expected, strict=False), 1):
        if one != wanted:
            yield f"{where}: event {place} is expected to be {short(wanted)}; seen {short(one)}"
            return
    if len(seen) != len(expected):
        yield f"{where}: {len(expected)} events are expected; seen {len(seen)}, the last is {short(last(seen))}"


def _ended(where: str, exchange: HttpExchange) -> Iterator[str]:
    if exchange.status != 200:
        yield f"{where}: status 200 is expected; seen {exchange.status}: {exchange.body[:160]!r}"
    elif not exchange.complete:
        told = "it was open when the kit gave up waiting" if exchange.late else exchange.cut or "one that does not"
        yield f"{where}: a response that ends is expected; seen {told}"


def r10(evidence: Evidence) -> Iterator[str]:
    """Every position gives what comes after it."""
    whole = events_in(evidence, "text", "start")
    for label, exchange in evidence.scene("text").http.items():
        if label.startswith("after-"):
            after = int(label.removeprefix("after-"))
            yield from _same(f"text: Last-Event-ID {after}", exchange, whole[after:])
    yield from _same("text: ?after=1", evidence.http("text", "query"), whole[1:])
    rest = events_in(evidence, "approve", "resume")
    yield from _same("approve: a client that waited over the parked phase", evidence.http("approve", "waiting"), rest)


def r11(evidence: Evidence) -> Iterator[str]:
    """Failed and cancelled runs end with an event, and the response as HTTP wants."""
    for scene, kind in ("error", "error"), ("cancel", "done"):
        exchange = evidence.http(scene, "start")
        yield from _ended(f"{scene}/start", exchange)
        events = events_of(exchange.frames)
        end = last(events)
        if end is None or end.WhichOneof("payload") != kind:
            yield f"{scene}/start: the last event is expected to be {kind}; seen {short(end)}"
        elif kind == "done" and (not end.done.content or end.done.content != text_of(events)):
            yield f"{scene}/start: done.content is expected to be the text so far; seen {short(end)}"
    if evidence.http("cancel", "cancel").status != 200:
        yield f"cancel/cancel: status 200 is expected; seen {evidence.http('cancel', 'cancel').status}"


def r12(evidence: Evidence) -> Iterator[str]:
    """The same request_id gives the same events."""
    yield from _same("text: the same request_id", evidence.http("text", "again"), events_in(evidence, "text", "start"))
    yield from _same("approve: resume with the same request_id", evidence.http("approve", "resume-again"),
                     events_in(evidence, "approve", "resume"))  # fmt: skip


def _plays_judge(names: Sequence[str], *, thin: bool) -> Judge:
    """Return S1: content, steps and kind of end of scenarios, as far as a route shows them."""

    def judge(evidence: Evidence) -> Iterator[str]:
        for name in names:
            scene = {"approval": "approve"}.get(name, name)
            events = lifted(evidence.http(scene, "start"), 0)
            end, play = last(events), PLAYS[name]
            if end is None or end.WhichOneof("payload") not in {"done", "error"}:
                yield f"{name}: a first segment is expected; seen {len(events)} events, the last is {short(end)}"
                continue
            kind = end.WhichOneof("payload")
            if (kind == "error") != (play.ends == "error"):
                yield f"{name}: it is expected to end with {play.ends}; seen {short(end)}"
            content = text_of(events) if kind == "error" else end.done.content
            if not re.fullmatch(play.content, content, re.DOTALL):
                yield f"{name}: its text is expected to be {play.content!r}; seen {content[:200]!r}"
            steps = [named(step) for step in end.done.process_steps]
            if play.steps and steps != list(play.steps):
                yield f"{name}: its steps are expected to be {list(play.steps)}; seen {steps}"
            asked = any(event.WhichOneof("payload") == "interrupt" for event in events)
            if play.ends == "INTERRUPTED" and not asked and not thin:
                yield f"{name}: an interrupt is expected; there is none"

    return judge


def heartbeat(evidence: Evidence) -> Iterator[str]:
    """A comment within the silence."""
    evidence.http("silent", "head")
    if "heard" not in evidence.scene("silent").http:
        exchange = evidence.http("silent", "unheard")
        yield f"silent: a heartbeat comment is expected within 20 s; seen {exchange.body[:120]!r}"


def head_at_once(evidence: Evidence) -> Iterator[str]:
    """The head comes while there is nothing to say."""
    for scene in ("silent", "approve"):
        head = evidence.http(scene, "head")
        if head.status != 200:
            told = "none before the time-out" if head.late or not head.status else head.status
            yield f"{scene}/head: a head with status 200 is expected while the run is parked; seen {told}"


def no_content(evidence: Evidence) -> Iterator[str]:
    """204 at the end, and only there."""
    end = evidence.http("text", "end")
    if end.status != 204:
        yield f"text/end: status 204 is expected for a final run with nothing left; seen {end.status}"
    if evidence.http("silent", "head").status == 204:
        yield "silent/head: a stream that stays open is expected for a parked run; seen 204"


def header_wins(evidence: Evidence) -> Iterator[str]:
    """The header counts before the query."""
    yield from _same("text: Last-Event-ID 2 with ?after=0", evidence.http("text", "both"),
                     events_in(evidence, "text", "start")[2:])  # fmt: skip


def _refused(where: str, exchange: HttpExchange, status: int, reason: str) -> Iterator[str]:
    found: object = None
    if exchange.headers.get("content-type", "").startswith("application/json"):
        try:
            found = json.loads(exchange.body)["error"]["reason"]
        except (ValueError, KeyError, TypeError):
            found = None
    if (exchange.status, found) != (status, reason):
        seen = f"{exchange.status} {exchange.body[:120]!r}"
        yield f"{where}: {status} with JSON error.reason {reason} is expected; seen {seen}"


def refusals(evidence: Evidence) -> Iterator[str]:
    """Each refusal under its status."""
    for place, status, reason in (
        ("refusals/agent", 404, "UNKNOWN_AGENT"),
        ("refusals/conversation", 404, "UNKNOWN_CONVERSATION"),
        ("refusals/no-json", 400, "INVALID_REQUEST"),
        ("refusals/no-message", 400, "INVALID_REQUEST"),
        ("refusals/run", 404, "UNKNOWN_RUN"),
        ("refusals/resume", 404, "UNKNOWN_RUN"),
        ("refusals/cancel", 404, "UNKNOWN_RUN"),
        ("text/reused", 409, "REQUEST_ID_REUSED"),
        ("text/beyond", 416, "AFTER_SEQ_OUT_OF_RANGE"),
        ("approve/twice", 409, "ALREADY_ANSWERED"),
    ):
        yield from _refused(place, evidence.http(*place.split("/")), status, reason)


def names_run(evidence: Evidence) -> Iterator[str]:
    """X-Run-Id in every head."""
    for where, exchange in event_streams(evidence):
        events = events_of(exchange.frames)
        seen = exchange.headers.get("x-run-id", "")
        if not seen or (events and seen != events[0].run_id):
            wanted = events[0].run_id if events else "the run's id"
            yield f"{where}: X-Run-Id {wanted} is expected; seen {seen!r}"


def name_styles(evidence: Evidence) -> Iterator[str]:
    """Both styles are taken, others are not."""
    yield from _ended("text/camel", evidence.http("text", "camel"))
    yield from _ended("approve/resume", evidence.http("approve", "resume"))
    unknown = evidence.http("refusals", "unknown-key")
    yield from _refused("refusals/unknown-key", unknown, 400, "INVALID_REQUEST")


def goes_on(evidence: Evidence) -> Iterator[str]:
    """A run goes on when the response is left."""
    evidence.http("leave", "start")
    if len(events_in(evidence, "leave", "later")) < 15:
        yield f"leave/later: 15 events are expected a while later; seen {len(events_in(evidence, 'leave', 'later'))}"


def _one_error(where: str, exchange: HttpExchange, code: str = "") -> Iterator[str]:
    wires = [parse(frame) or {} for frame in exchange.frames]
    diagnosis = wires[0].get("diagnosis") if wires else None
    seen = diagnosis.get("code") if isinstance(diagnosis, dict) else None
    if exchange.status != 200 or [wire.get("type") for wire in wires] != ["error"] or (code and code != seen):
        wanted = f" with diagnosis.code {code}" if code else ""
        yield f"{where}: 200 and one error frame{wanted} are expected; seen {exchange.status} {exchange.body[:200]!r}"


def failures(evidence: Evidence) -> Iterator[str]:
    """What cannot start is one error frame."""
    for label, code in (
        ("no-json", "invalid.request"),
        ("empty", "invalid.request"),
        ("agent", "unknown.agent"),
        ("conversation", "unknown.conversation"),
    ):
        yield from _one_error(f"refusals/{label}", evidence.http("refusals", label), code)


def waiting_step(evidence: Evidence) -> Iterator[str]:
    """The waiting step says that it waits."""
    events = events_in(evidence, "approve", "start")
    steps = [e.step.step for e in events if e.WhichOneof("payload") == "step"]
    listed = [step for e in events for step in e.done.process_steps]
    for where, found in ("the last step event", steps), ("process_steps", listed):
        code = found[-1].diagnosis.code if found else None
        if code != "approval.required":
            yield f"approve/start: {where} is expected to have the diagnosis approval.required; seen {code!r}"
    yield from _one_error("approve/message", evidence.http("approve", "message"))


def integer_id(evidence: Evidence) -> Iterator[str]:
    """An integer is taken as its text; there is no such conversation, which is what the refusal says."""
    yield from _one_error("refusals/integer", evidence.http("refusals", "integer"), "unknown.conversation")


def goes_on_talking(evidence: Evidence) -> Iterator[str]:
    """The next message belongs to the conversation and answers its question."""
    before, events = last(events_in(evidence, "question", "start")), events_in(evidence, "question", "answer")
    end = last(events)
    if end is None or "blue" not in end.done.content:
        yield f"question/answer: an answer with 'blue' is expected; seen {short(end)}"
    elif before is not None and end.done.conversation_id != before.done.conversation_id:
        yield f"question/answer: conversation {before.done.conversation_id} is expected; seen {short(end)}"


_COMMON_PLAYS: Final = ("text", "tool", "args", "approval", "question", "rewind", "error", "long", "loop")

NATIVE_JUDGES: Final[Mapping[str, Judge]] = {
    "S1": _plays_judge(_COMMON_PLAYS, thin=False),
    **{name: RULE_JUDGES[name] for name in ("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8")},
    "R9": frame_judges.canonical_args,
    "R10": r10,
    "R11": r11,
    "R12": r12,
    "W3": frame_judges.args_judge(ARGS_ESCAPED),
    "L1": goes_on,
    "F1": frame_judges.framing,
    "F2": frame_judges.bytes_judge(escaped=True),
    "F3": frame_judges.keys,
    "F4": frame_judges.ids,
    "F5": frame_judges.escapes,
    "H1": headers,
    "H2": heartbeat,
    "H3": head_at_once,
    "H4": no_content,
    "H5": header_wins,
    "H6": refusals,
    "H8": names_run,
    "H9": name_styles,
}
ORIGINAL_JUDGES: Final[Mapping[str, Judge]] = {
    "S1": _plays_judge(_COMMON_PLAYS, thin=True),
    "R2": rule("R2", "text", "question"),
    "R5": rule("R5", "text", "tool", skip=("rewind",)),
    "R6": rule("R6", "text", "tool"),
    "R7": rule("R7", "tool", "question"),
    "W3": frame_judges.args_judge(ARGS),
    "F1": frame_judges.bare_framing,
    "F2": frame_judges.bytes_judge(escaped=False),
    "F3": frame_judges.keys,
    "F6": frame_judges.thin,
    "F7": frame_judges.five_types,
    "F8": frame_judges.shown,
    "H1": headers,
    "H7": failures,
    "H10": waiting_step,
    "H11": integer_id,
    "H12": goes_on_talking,
}
