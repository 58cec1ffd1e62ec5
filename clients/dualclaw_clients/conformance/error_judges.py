"""Judges of refusals: which code and which reason each mistake gets, and what the status says beside them."""

import json
from collections.abc import Iterator, Mapping
from typing import Final

from dualclaw.errors import Reason
from dualclaw.status import CODES, DOMAIN
from dualclaw_clients.conformance.seen import Evidence, Exchange, Unseen, last, short
from dualclaw_clients.conformance.stream_judges import Judge

STATUS_LIMIT: Final = 8_000
"""Bytes of a status beyond which servers and proxies drop it with the whole call."""


def refused(where: str, exchange: Exchange, reason: Reason) -> Iterator[str]:
    """Yield what is wrong with a refusal: its code, its ErrorInfo, or that there is none."""
    code = CODES[reason].name
    wanted = f"a status {code} with ErrorInfo {DOMAIN}/{reason} is expected"
    if exchange.late or exchange.status is None:
        yield f"{where}: {wanted}; the call was still open when the kit gave up waiting"
    elif exchange.events:
        yield f"{where}: {wanted}; seen events, the first is {short(exchange.events[0])}"
    elif (exchange.status.code, exchange.status.domain, exchange.status.reason) != (code, DOMAIN, reason):
        yield f"{where}: {wanted}; seen {exchange.status}: {exchange.status.text[:160]}"


def _refusals(reason: Reason, *places: str) -> Judge:
    """Return the judge of a reason; each place is "scene/label"."""

    def judge(evidence: Evidence) -> Iterator[str]:
        for place in places:
            yield from refused(place, evidence.call(*place.split("/")), reason)

    return judge


def invalid(evidence: Evidence) -> Iterator[str]:
    """Malformed requests name the field that is wrong."""
    named = {
        "refusals/no-message": "message",
        "refusals/assistant": "role",
        "refusals/long-request-id": "request_id",
        "refusals/model": "model",
        "refusals/no-run-id": "run_id",
        "refusals/page-size": "page_size",
        "refusals/page-token": "page_token",
        "text/negative": "after_seq",
        "approve/wrong-hash": "args_hash",
        "loop/raised": "max_steps",
    }
    for place, field in named.items():
        exchange = evidence.call(*place.split("/"))
        yield from (faults := list(refused(place, exchange, "INVALID_REQUEST")))
        fields = exchange.status.fields if exchange.status else ()
        if not faults and not any(field in name for name in fields):
            yield f"{place}: BadRequest is expected to name {field}; seen {list(fields)}"
    yield from refused("refusals/no-proto", evidence.call("refusals", "no-proto"), "INVALID_REQUEST")


def busy_refusal(evidence: Evidence) -> Iterator[str]:
    """CONVERSATION_BUSY names the run and the questions that are open."""
    for scene, label, first in ("busy", "rejected", "active"), ("approve", "message", "start"):
        exchange = evidence.call(scene, label)
        yield from (faults := list(refused(f"{scene}/{label}", exchange, "CONVERSATION_BUSY")))
        run_id = evidence.call(scene, first).events[0].run_id
        told = exchange.status.metadata if exchange.status else {}
        if not faults and told.get("run_id") != run_id:
            yield f"{scene}/{label}: metadata run_id is expected to be {run_id}; seen {told.get('run_id')!r}"
        if not faults and scene == "approve" and _names(told.get("interrupts", "")) != ["pay-a"]:
            yield f'{scene}/{label}: metadata interrupts is expected to be ["pay-a"]; seen {told.get("interrupts")!r}'


def _names(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def out_of_range(evidence: Evidence) -> Iterator[str]:
    """A position beyond the end is refused, and the end named."""
    exchange, end = evidence.call("text", "beyond"), last(evidence.call("text", "start").events)
    yield from (faults := list(refused("text/beyond", exchange, "AFTER_SEQ_OUT_OF_RANGE")))
    told = exchange.status.metadata.get("last_seq") if exchange.status else None
    if not faults and end is not None and told != str(end.seq):
        yield f"text/beyond: metadata last_seq is expected to be {end.seq}; seen {told!r}"


def small_status(evidence: Evidence) -> Iterator[str]:
    """A status stays small, however long what it is about."""
    exchange = evidence.call("refusals", "long-agent")
    size = exchange.status.size if exchange.status else 0
    if exchange.status is None or exchange.status.code not in {"NOT_FOUND", "INVALID_ARGUMENT"}:
        yield f"refusals/long-agent: NOT_FOUND or INVALID_ARGUMENT is expected; seen {exchange.status}"
    elif size > STATUS_LIMIT:
        yield f"refusals/long-agent: a status of at most {STATUS_LIMIT} bytes is expected; seen {size}"


def not_switchable(evidence: Evidence) -> Iterator[str]:
    """An interceptor that is not switchable stays as it is."""
    evidence.call("refusals", "known")
    if "switch" not in evidence.scene("refusals").exchanges:
        raise Unseen("the agent has no interceptor that callers may not switch")
    yield from refused("refusals/switch", evidence.call("refusals", "switch"), "NOT_SWITCHABLE")
    all_ = evidence.call("refusals", "switch-for-all")
    if all_.status is None or all_.status.reason != "PERMISSION_DENIED":  # the caller may not be an operator
        yield from refused("refusals/switch-for-all", all_, "NOT_SWITCHABLE")


ERROR_JUDGES: Final[Mapping[str, Judge]] = {
    "E1": invalid,
    "E2": _refusals("UNKNOWN_AGENT", "refusals/agent", "refusals/get-agent"),
    "E3": _refusals("UNKNOWN_RUN", "refusals/get", "refusals/attach", "refusals/cancel", "refusals/resume"),
    "E4": _refusals("UNKNOWN_CONVERSATION", "refusals/conversation", "refusals/get-conversation", "refusals/messages"),
    "E5": _refusals("UNKNOWN_INTERRUPT", "approve/unknown", "partial/not-all"),
    "E6": _refusals("ALREADY_ANSWERED", "approve/twice", "partial/twice", "partial/final"),
    "E7": _refusals("RUN_NOT_INTERRUPTED", "text/not-parked"),
    "E8": busy_refusal,
    "E9": _refusals("REQUEST_ID_REUSED", "text/reused"),
    "E10": out_of_range,
    "E11": not_switchable,
    "E12": _refusals("OVERLOADED", "busy/overloaded"),
    "E13": _refusals("UNAUTHENTICATED", "keys/none", "keys/none-run", "keys/wrong", "keys/wrong-run"),
    "E14": small_status,
}
