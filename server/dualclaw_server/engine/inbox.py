"""What waits in a run's inbox, and whether a run at rest has something to do for it."""

from __future__ import annotations

from collections.abc import Iterable

from dualclaw import RunState
from dualclaw_server.engine import questions
from dualclaw_server.engine.checkpoint import CancelSignal, Checkpoint, ResumeSignal, load_signal
from dualclaw_server.engine.store import InboxSignal, Loaded


def find_cancel(unread: Iterable[InboxSignal]) -> CancelSignal | None:
    """Return the wish that the run ends; None when nobody has it."""
    for signal in unread:
        body = load_signal(signal.body)
        if body.WhichOneof("signal") == "cancel":
            return body.cancel
    return None


def resumes_in(unread: Iterable[InboxSignal]) -> list[tuple[str, ResumeSignal]]:
    """Return the answers, in order, with the id of their signal."""
    found = []
    for signal in unread:
        body = load_signal(signal.body)
        if body.WhichOneof("signal") == "resume":
            found.append((signal.signal_id, body.resume))
    return found


def is_due(loaded: Loaded, checkpoint: Checkpoint, now: float) -> bool:
    """Tell whether there is something to do for a run that is not at work; ``now`` in seconds since the epoch."""
    if find_cancel(loaded.unread) is not None:
        return True
    if loaded.head.state != RunState.RUN_STATE_INTERRUPTED:
        return False
    expiry = questions.next_expiry(checkpoint)
    return bool(resumes_in(loaded.unread)) or (expiry is not None and expiry <= now)
