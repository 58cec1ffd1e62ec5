"""Checks of calls.

Refusals (E), attach (A), decisions (D), cancel (C), leaving (L), busy (B), limits (M), tenants (T), a crash (K).
"""

from typing import Final

from dualclaw_clients.conformance.check import Check


def _reason(id_: str, reason: str, text: str, *, needs: str = "", implies: tuple[str, ...] = ()) -> Check:
    """Return the check of a refusal."""
    place = f"ErrorReason.ERROR_REASON_{reason}"
    return Check(id_, f"{reason} has its code and its ErrorInfo", text, "1.4", place, implies=implies, needs=needs)


ERRORS: Final = (
    _reason("E1", "INVALID_REQUEST", "Malformed requests are INVALID_ARGUMENT, and BadRequest names the field."),
    _reason("E2", "UNKNOWN_AGENT", "An agent that does not exist is NOT_FOUND."),
    _reason(
        "E3", "UNKNOWN_RUN", "A run that does not exist is NOT_FOUND, in every rpc that names one.", implies=("T1",)
    ),
    _reason(
        "E4",
        "UNKNOWN_CONVERSATION",
        "A conversation that does not exist is NOT_FOUND; none is made by its name.",
        implies=("T1",),
    ),
    _reason("E5", "UNKNOWN_INTERRUPT", "A decision about a question the run never asked is NOT_FOUND."),
    _reason(
        "E6",
        "ALREADY_ANSWERED",
        "The second answer to a question is FAILED_PRECONDITION, while the run is parked, running or final.",
    ),
    _reason("E7", "RUN_NOT_INTERRUPTED", "A decision for a run that waits for nothing is FAILED_PRECONDITION."),
    _reason(
        "E8",
        "CONVERSATION_BUSY",
        "A message to a busy conversation is FAILED_PRECONDITION; metadata run_id names the run, interrupts its "
        "questions.",
        implies=("D8",),
    ),
    _reason("E9", "REQUEST_ID_REUSED", "The same request_id with another body is ALREADY_EXISTS."),
    _reason(
        "E10",
        "AFTER_SEQ_OUT_OF_RANGE",
        "An attach beyond the newest event is OUT_OF_RANGE; metadata last_seq names the newest.",
    ),
    _reason("E11", "NOT_SWITCHABLE", "Switching an interceptor that callers may not switch is PERMISSION_DENIED."),
    _reason("E12", "OVERLOADED", "The ninth message in line of a conversation is RESOURCE_EXHAUSTED."),
    _reason("E13", "UNAUTHENTICATED", "A call without a key, or with a wrong one, is UNAUTHENTICATED.", needs="--key"),
    Check(
        "E14",
        "A status stays small",
        "However long the text a call is refused for, the status stays below what servers and proxies let pass; a "
        "larger one would be lost with everything it says.",
        "1.4",
        "ErrorReason",
    ),
)

CALLS: Final = (
    Check(
        "A1",
        "At the end there is nothing to read",
        "An attach after the last event of a parked or final run is an empty stream with OK, no refusal.",
        "1.4",
        "EngineService.Attach",
        implies=("R10",),
    ),
    Check(
        "A2",
        "Without wait an attach ends where the run is parked",
        "It ends at the terminal event that has no later segment, instead of staying open.",
        "1.4",
        "AttachRequest.wait",
        implies=("R10", "A1"),
    ),
    Check(
        "A3",
        "With wait an attach stays until the run is final",
        "A client that waits gets the next segment as well, whoever answers the questions.",
        "1.4",
        "AttachRequest.wait",
        implies=("R10",),
    ),
    Check(
        "A4",
        "Stored events first, then live ones",
        "A client that attaches to a run that talks gets what was said and then what is being said, to the end.",
        "1.4",
        "EngineService.Attach",
        implies=("R10",),
    ),
    Check(
        "D1", "APPROVE runs the call as it was asked", "The call runs with the arguments the question showed, under "
        "the index it waited under.", "1.4", "DecisionAction.DECISION_ACTION_APPROVE", implies=("R10",),
    ),
    Check(
        "D2", "REJECT keeps the call from running", "It ends fail with tool.rejected, and the run goes on without it.",
        "1.4", "DecisionAction.DECISION_ACTION_REJECT", implies=("R7", "D5"),
    ),
    Check(
        "D3", "EDIT runs the call with the new arguments", "The step shows the arguments it was really run with.",
        "1.4", "DecisionAction.DECISION_ACTION_EDIT",
    ),
    Check(
        "D4", "Answers that leave questions open ask the rest", "They are stored, and the segment they give is "
        "interrupt with the rest and done.", "1.4", "EngineService.Resume", implies=("D5", "E5", "E6"),
    ),
    Check(
        "D5", "All decisions of a call are accepted, or none", "If one of them is refused, the questions of the others "
        "are still open.", "1.4", "EngineService.Resume",
    ),
    Check(
        "D6", "RESPOND answers a question", "The tool that asked gets the response, and the run goes on.",
        "1.4", "DecisionAction.DECISION_ACTION_RESPOND",
    ),
    Check(
        "D7", "A message answers the one open question", "Run in a conversation that waits for one answer is that "
        "answer; it streams the next segment of the old run.", "1.4", "EngineService.Run",
    ),
    Check(
        "D8", "A message never answers an approval", "It is refused, and the approval is open as before: whoever types "
        "into a chat approves nothing by it.", "1.4", "EngineService.Run", implies=("E8", "E5", "E1", "D1"),
    ),
    Check(
        "D9", "A parked run says what it waits for", "GetRun says INTERRUPTED and lists the items of the interrupt, so "
        "a client that comes later can answer.", "1.3", "Run.interrupts", implies=("D8",),
    ),
    Check(
        "C1", "A running run can be cancelled", "Cancel is answered at once, and the run ends soon after.",
        "1.4", "EngineService.Cancel", implies=("R11",),
    ),
    Check(
        "C2", "A parked run can be cancelled", "It gets a last segment that closes its steps, and asks no longer.",
        "1.4", "EngineService.Cancel",
    ),
    Check(
        "C3", "Cancelling a final run changes nothing", "The run is returned as it is.", "1.4", "EngineService.Cancel",
    ),
    Check(
        "L1", "A run goes on without its starter", "Unless it was asked otherwise, a run does not end because a "
        "connection does.", "1.4", "DisconnectPolicy.DISCONNECT_POLICY_KEEP_RUNNING", ("engine", "native"),
    ),
    Check(
        "L2", "A run ends with its starter if that was asked", "With CANCEL it is cancelled once nobody has been "
        "attached for 10 seconds.", "1.4", "DisconnectPolicy.DISCONNECT_POLICY_CANCEL",
    ),
    Check(
        "B1", "QUEUE waits in line", "Messages run after the active run, first come first served, and are QUEUED until "
        "then.", "1.4", "BusyPolicy.BUSY_POLICY_QUEUE", implies=("E12", "B2"),
    ),
    Check(
        "B2", "REPLACE cancels all and runs", "The active run and all that wait end with CANCELLED.",
        "1.4", "BusyPolicy.BUSY_POLICY_REPLACE",
    ),
    Check(
        "M1", "max_steps lowers the limit", "A run ends with STEP_LIMIT at the lower of the two limits.",
        "1.3", "RunOptions.max_steps",
    ),
    Check(
        "M2", "Lists come in pages", "A page has at most page_size items; with the tokens every item comes once, runs "
        "newest first, messages oldest first; 0 and huge sizes are taken.", "1.3", "ListRunsRequest.page_size",
    ),
    Check(
        "M3", "A request that is too large harms nobody", "40 MB are refused by a status, and the next call works.",
        "1.4", "ErrorReason.ERROR_REASON_INVALID_REQUEST",
    ),
    Check(
        "T1", "Another tenant's run is unknown", "Every rpc that names it says UNKNOWN_RUN or UNKNOWN_CONVERSATION, as "
        "for one that never was, and nothing happens to it.", "1.4", "ErrorReason.ERROR_REASON_UNKNOWN_RUN",
        needs="--other-key",
    ),
    Check(
        "T2", "Lists hold one's own", "Runs and conversations of another tenant are in no list.",
        "1.4", "EngineService.ListRuns", needs="--other-key",
    ),
    Check(
        "T3", "A request_id is a tenant's own", "The same one in another tenant starts another run.",
        "1.4", "RunRequest.request_id", needs="--other-key",
    ),
    Check(
        "K1", "A run survives its server", "Killed in the middle, it goes on: every event a client has is there, none "
        "is lost or doubled, and the same request_id gives the whole.", "1.9", "EngineService.Attach",
        implies=("R1", "R5"), needs="--restart",
    ),
    Check(
        "K2", "What was stored stays", "Runs that were over or parked are the same after a crash, event for event.",
        "1.9", "EngineService.Attach", needs="--restart",
    ),
    Check(
        "K3", "A parked run can be answered after a crash", "The approval that was open is open, and its answer runs.",
        "1.4", "EngineService.Resume", needs="--restart",
    ),
)  # fmt: skip
