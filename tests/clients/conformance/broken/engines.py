"""One broken engine for every check: what it does wrong, and which checks have to find it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualclaw import DecisionAction

from .call_hooks import (
    AcceptsSome,
    BreaksOff,
    BusyWithQuestions,
    Deaf,
    EndsWithStarter,
    ErrorAsStatus,
    Forgets,
    ForgetsQuestions,
    LongStatus,
    Looks,
    RefusesFinal,
    RefusesTheEnd,
    Rewrites,
    StoredOnly,
    always_wait,
    approve_the_rest,
    as_owner,
    decide_otherwise,
    forget_request_id,
    misnamed,
    never_wait,
    no_line,
    no_questions,
    one_less,
    one_page,
    other_code,
    other_reason,
    replace_nothing,
    requests,
    starters_may_leave,
    steps_as_ever,
    taken_for_approved,
    without_details,
)
from .engine_proxy import Honest
from .event_hooks import (
    EmptyMessage,
    StartsTwice,
    altered,
    dense_args,
    double_number,
    drop_done,
    drop_index,
    finished_instead,
    go_on_after_done,
    known_usage,
    longer_done,
    never_parked,
    no_run_id,
    other_message,
    other_order,
    other_result,
    other_text,
    other_trace,
    rename_fetch,
    repeat_seq,
    skip_seq,
)


@dataclass(frozen=True)
class Broken:
    """A server that is wrong in one way."""

    name: str
    """What it does wrong."""
    hooks: Callable[[], Honest]
    fails: tuple[str, ...]
    """Checks that must fail; others may only as far as these name them as implied."""
    scenes: tuple[str, ...] = ()
    """Scenes that are played in any case: those that are not usual, or whose calls do not show who makes them."""
    timeout: float = 30
    """Seconds a call may take; less for a server that leaves calls open."""


APPROVE, REJECT, EDIT, SKIP, RESPOND = (
    DecisionAction.DECISION_ACTION_APPROVE,
    DecisionAction.DECISION_ACTION_REJECT,
    DecisionAction.DECISION_ACTION_EDIT,
    DecisionAction.DECISION_ACTION_SKIP,
    DecisionAction.DECISION_ACTION_RESPOND,
)
OTHER = '{"to": "a", "amount": 6}'

ENGINES: Sequence[Broken] = (
    Broken("calls a tool by another name", altered("tool", rename_fetch), ("S1",)),
    Broken("repeats a seq", altered("tool", repeat_seq), ("R1",)),
    Broken("skips a seq", altered("tool", skip_seq), ("R1",)),
    Broken("drops the terminal event", altered("tool", drop_done), ("R2",)),
    Broken("goes on after the terminal event", altered("tool", go_on_after_done), ("R2",)),
    Broken("parks a run as finished", altered("question", never_parked), ("R3",)),
    Broken("opens a step twice", StartsTwice, ("R4",)),
    Broken("sends a step without its index", altered("tool", drop_index), ("R4",)),
    Broken("says another text in done", altered("tool", longer_done), ("R5",)),
    Broken("lists another result in done", altered("tool", other_result), ("R6",)),
    Broken("lists skills in another order", altered("tool", other_order), ("R7",)),
    Broken("changes the trace within a segment", altered("tool", other_trace), ("R8",)),
    Broken("leaves the run_id out", altered("tool", no_run_id), ("R8",)),
    Broken("prints arguments without spaces", altered("tool", dense_args), ("R9",)),
    Broken("attaches one event too early", requests(one_less), ("R10",)),
    Broken("tells a second client something else", altered("text", other_text, "Attach"), ("R10",)),
    Broken("fails a run by a status", ErrorAsStatus, ("R11",)),
    Broken("calls a cancelled run finished", altered("slow", finished_instead), ("R11",)),
    Broken("forgets the request_id", requests(forget_request_id), ("R12",)),
    Broken("sends a message without events", EmptyMessage, ("W1",)),
    Broken("sends 0 for unknown", altered("text", known_usage), ("W2",)),
    Broken("loses presence of index 0", altered("args", drop_index), ("W2",)),
    Broken("reads big integers as doubles", altered("args", double_number), ("W3",)),
    Broken("names another message", altered("text", other_message), ("W4",)),
    Broken("names no field", misnamed("INVALID_REQUEST", other_reason("INVALID_REQUEST")), ("E1",)),
    Broken("has another code for UNKNOWN_AGENT", misnamed("UNKNOWN_AGENT", other_code), ("E2",)),
    Broken("has no ErrorInfo for UNKNOWN_RUN", misnamed("UNKNOWN_RUN", without_details), ("E3",)),
    Broken("calls a conversation a run", misnamed("UNKNOWN_CONVERSATION", other_reason("UNKNOWN_RUN")), ("E4",)),
    Broken("has no ErrorInfo for UNKNOWN_INTERRUPT", misnamed("UNKNOWN_INTERRUPT", without_details), ("E5",)),
    Broken("calls a second answer unknown", misnamed("ALREADY_ANSWERED", other_reason("UNKNOWN_INTERRUPT")), ("E6",)),
    Broken("has another code for RUN_NOT_INTERRUPTED", misnamed("RUN_NOT_INTERRUPTED", other_code), ("E7",)),
    Broken("names no run that is busy", misnamed("CONVERSATION_BUSY", other_reason("CONVERSATION_BUSY")), ("E8",)),
    Broken("has another code for REQUEST_ID_REUSED", misnamed("REQUEST_ID_REUSED", other_code), ("E9",)),
    Broken("names no last_seq", misnamed("AFTER_SEQ_OUT_OF_RANGE", other_reason("AFTER_SEQ_OUT_OF_RANGE")), ("E10",)),
    Broken("has no ErrorInfo for NOT_SWITCHABLE", misnamed("NOT_SWITCHABLE", without_details), ("E11",)),
    Broken("calls a long line a quota", misnamed("OVERLOADED", other_reason("QUOTA_EXCEEDED")), ("E12",)),
    Broken("has another code for UNAUTHENTICATED", misnamed("UNAUTHENTICATED", other_code), ("E13",)),
    Broken("repeats the request in the status", LongStatus, ("E14",)),
    Broken("refuses an attach at the end", RefusesTheEnd, ("A1",)),
    Broken("waits always", requests(always_wait), ("A2",), timeout=15),
    Broken("never waits", requests(never_wait), ("A3",)),
    Broken("sends what is stored and nothing live", StoredOnly, ("A4",)),
    Broken("changes what was approved", decide_otherwise(APPROVE, EDIT, OTHER), ("D1",)),
    Broken("runs what was rejected", decide_otherwise(REJECT, APPROVE), ("D2",)),
    Broken("forgets the new arguments", decide_otherwise(EDIT, APPROVE), ("D3",)),
    Broken("approves what was not answered", requests(approve_the_rest), ("D4",)),
    Broken("accepts half a call", AcceptsSome, ("D5",)),
    Broken("throws a response away", decide_otherwise(RESPOND, SKIP), ("D6",)),
    Broken("takes no message for an answer", BusyWithQuestions, ("D7",)),
    Broken("takes a message for an approval", lambda: Looks("approval", taken_for_approved), ("D8",)),
    Broken("does not say what it waits for", lambda: Looks("question", no_questions), ("D9",)),
    Broken("lets a cancelled run go on", lambda: Deaf("slow"), ("C1",)),
    Broken("leaves a cancelled run parked", lambda: Deaf("approval"), ("C2",), timeout=15),
    Broken("refuses to cancel what is over", RefusesFinal, ("C3",)),
    Broken("ends a run with its starter", EndsWithStarter, ("L1",)),
    Broken("never ends a run with its starter", requests(starters_may_leave), ("L2",), ("leave-cancel",)),
    Broken("has no line", requests(no_line), ("B1",)),
    Broken("replaces nothing", requests(replace_nothing), ("B2",)),
    Broken("does not lower a limit", requests(steps_as_ever), ("M1",)),
    Broken("has one page", requests(one_page), ("M2",)),
    Broken("breaks off over a large request", BreaksOff, ("M3",), ("sizes",)),
    Broken("shows a run to everybody", as_owner("GetRun"), ("T1",), ("tenants",)),
    Broken("lists everybody's runs", as_owner("ListRuns"), ("T2",), ("tenants",)),
    Broken("shares request ids", as_owner("Run"), ("T3",), ("tenants",)),
    Broken("loses an event in a crash", Forgets, ("K1",), ("crash",)),
    Broken("changes a final run in a crash", Rewrites, ("K2",), ("crash",)),
    Broken("loses its questions in a crash", ForgetsQuestions, ("K3",), ("crash",)),
)
