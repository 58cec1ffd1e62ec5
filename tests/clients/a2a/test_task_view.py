"""What each event of the engine changes in a task."""

from a2a.types.a2a_pb2 import TASK_STATE_CANCELED, TASK_STATE_COMPLETED, TASK_STATE_INPUT_REQUIRED, TASK_STATE_WORKING

from dualclaw import InterruptItem, InterruptKind
from dualclaw.events import make_delta, make_diagnosis, make_done, make_error, make_interrupt, make_rewind, make_step
from dualclaw_clients.a2a.task_view import TaskView, merged


def done(text: str, seq: int, reason: str = "finished"):
    return make_done(message_id="m", conversation_id="c", content=text, stop_reason=reason, seq=seq)


def chunks(*events) -> list[tuple[str, str, bool, bool]]:
    view = TaskView("r", "c")
    updates = merged(update for event in events for update in view.apply(event))
    return [
        (u.artifact.artifact_id, u.artifact.parts[0].text, u.append, u.last_chunk)
        for u in updates
        if hasattr(u, "artifact")
    ]


def test_neighbouring_chunks_go_out_together():
    """What came in one message is one update, and the end of the answer goes with it."""
    assert chunks(make_delta("a", seq=1), make_delta("b", seq=2), done("ab", 3)) == [("answer-1", "ab", False, True)]


def test_a_step_parts_chunks():
    """Order is kept: text before a step goes out before it."""
    step = make_step("skill", name="look", phase="start", index=0, seq=2)
    told = chunks(make_delta("a", seq=1), step, make_delta("b", seq=3), done("ab", 4))
    assert told == [("answer-1", "a", False, False), ("answer-1", "b", True, True)]


def test_a_rewind_replaces_and_later_text_appends_to_it():
    """A client that follows append ends with exactly the text the engine has."""
    events = [make_delta("wrong", seq=1), make_rewind("ri", seq=2), make_delta("ght", seq=3), done("right", 4)]
    assert chunks(*events) == [("answer-1", "wrong", False, False), ("answer-1", "right", False, True)]


def test_a_rewind_to_what_is_there_already_says_nothing():
    """Nothing was sent, and nothing is withdrawn."""
    assert chunks(make_rewind("", seq=1), make_delta("a", seq=2), done("a", 3)) == [("answer-1", "a", False, True)]


def test_content_that_was_never_streamed_or_differs_is_sent_whole():
    """Done decides: a client ends with its content whatever came before."""
    assert chunks(done("all", 1)) == [("answer-1", "all", False, True)]
    assert chunks(make_delta("al", seq=1), done("other", 2))[-1] == ("answer-1", "other", False, True)


def test_a_segment_is_an_artifact_and_seen_events_change_nothing():
    """Folding a log and then a stream of the same run gives every text once."""
    item = InterruptItem(id="i", kind=InterruptKind.INTERRUPT_KIND_QUESTION)
    log = [make_delta("one", seq=1), make_interrupt([item], seq=2), done("one", 3, "interrupted")]
    view = TaskView("r", "c")
    for event in log:
        view.apply(event)
    assert view.status.state == TASK_STATE_INPUT_REQUIRED
    assert (view.is_open, view.ever_asked) == (False, {"i"})
    assert [update for event in log for update in view.apply(event)] == []
    assert view.goes_on().status.state == TASK_STATE_WORKING
    for event in (make_delta("two", seq=4), done("two", 5)):
        view.apply(event)
    assert [(a.artifact_id, a.parts[0].text) for a in view.task().artifacts] == [
        ("answer-1", "one"),
        ("answer-4", "two"),
    ]
    assert view.task().status.state == TASK_STATE_COMPLETED


def test_cancelled_and_failed_runs_end_their_artifact():
    """What was said is all that will be said."""
    view = TaskView("r", "c")
    view.apply(make_delta("a", seq=1))
    updates = view.apply(done("a", 2, "cancelled"))
    assert updates[0].last_chunk
    assert updates[-1].status.state == TASK_STATE_CANCELED
    assert chunks(make_delta("a", seq=1), make_error("no", seq=2))[-1][-1]


def test_a_step_that_waits_says_so():
    """A call that waits for approval has not begun."""
    waits = make_diagnosis(code="approval.required", severity="warning", summary="?")
    view = TaskView("r", "c")
    step = make_step("skill", name="pay", phase="start", index=0, diagnosis=waits, args={"secret": "s"}, seq=1)
    updates = view.apply(step)
    assert updates[-1].status.message.parts[0].text == "pay: waits for an answer"
    assert "secret" not in str(updates)
