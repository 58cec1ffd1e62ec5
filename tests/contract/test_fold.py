"""RunView: what a run has said so far."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualclaw import EngineEvent, StepKind
from dualclaw.events import (
    make_delta,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
)
from dualclaw.fold import RunView

# Time says nothing here: the machine may be busy with other things.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def folded(*events: EngineEvent) -> RunView:
    """A view that was given these events."""
    view = RunView()
    for event in events:
        assert view.apply(event)
    return view


def done(content: str = "", stop_reason: str = "finished") -> EngineEvent:
    return make_done(message_id="m", conversation_id="c", content=content, stop_reason=stop_reason)


def test_new_view_is_empty() -> None:
    """Before the first event nothing has been said."""
    view = RunView()
    assert (view.text, view.reasoning, view.terminal, view.interrupts) == ("", "", None, ())
    assert (view.steps, view.process_steps, view.open_steps) == ({}, [], {})
    assert (view.last_seq, view.next_index, view.used_skills, view.used_mcp) == (0, 0, [], [])


def test_pieces_add_up() -> None:
    """Deltas make the text, reasoning pieces the reasoning, and one does not leak into the other."""
    view = folded(make_reasoning("I "), make_delta("你"), make_reasoning("think"), make_delta("好"), make_delta(""))
    assert (view.text, view.reasoning) == ("你好", "I think")


def test_reading_in_between_changes_nothing() -> None:
    """The text may be asked for at any time."""
    view = RunView()
    for number in range(5):
        view.apply(make_delta(str(number)))
        assert view.text == "01234"[: number + 1]
    assert view.text is view.text


def test_rewind_replaces_text_and_reasoning() -> None:
    """What was said before counts no more, what comes after is added."""
    view = folded(make_delta("Hel"), make_reasoning("a"), make_rewind("H", reasoning="b"), make_delta("i"))
    assert (view.text, view.reasoning) == ("Hi", "b")
    view.apply(make_rewind(""))
    assert (view.text, view.reasoning) == ("", "")


@pytest.mark.parametrize("end", [done("a"), make_error("bad")])
def test_segment_is_readable_until_the_next_one_begins(end: EngineEvent) -> None:
    """The finished text stays after the terminal event, and the next segment's first event starts afresh."""
    view = folded(make_delta("a"), make_reasoning("r"), end)
    assert (view.text, view.reasoning, view.terminal) == ("a", "r", end)
    view.apply(make_step("skill", name="n", phase="start", index=0))
    assert (view.text, view.reasoning, view.terminal) == ("", "", None)
    view.apply(make_delta("b"))
    assert view.text == "b"


def test_next_segment_may_begin_with_its_text_or_its_end() -> None:
    """The event that starts afresh counts itself."""
    assert folded(make_delta("a"), done("a"), make_delta("b")).text == "b"
    assert folded(make_delta("a"), done("a"), make_rewind("c")).text == "c"
    again = folded(make_delta("a"), done("a", "interrupted"), done("", "cancelled"))
    assert (again.text, again.terminal) == ("", done("", "cancelled"))


def test_last_event_of_an_index_replaces_the_step_whole() -> None:
    """Nothing of the earlier event stays."""
    view = folded(
        make_step("mcp", server="s", name="n", args={"a": 1}, phase="start", index=0, node={"id": "x"}),
        make_step("mcp", server="s", name="n", result="r", phase="ok", index=0),
    )
    assert view.process_steps == [make_step("mcp", server="s", name="n", result="r", phase="ok").step.step]


def test_steps_are_listed_in_index_order() -> None:
    """Whatever order they ended in."""
    events = [make_step("skill", name=f"n{i}", phase="ok", index=i) for i in (2, 0, 1)]
    view = folded(*events)
    assert [step.name for step in view.process_steps] == ["n0", "n1", "n2"]
    assert list(view.steps) == [2, 0, 1]
    assert view.next_index == 3


def test_steps_live_as_long_as_the_run() -> None:
    """A later segment goes on with the steps and their indexes, and may end what an earlier one began."""
    view = folded(make_step("skill", name="n", phase="start", index=0), done("", "interrupted"))
    assert view.open_steps == {0: make_step("skill", name="n", phase="start").step.step}
    view.apply(make_step("skill", name="n", phase="ok", index=0))
    assert view.open_steps == {}
    assert view.next_index == 1


def test_thinking_is_never_open() -> None:
    """A thinking step has no phase; it is complete when it comes."""
    view = folded(make_step("thinking", text="t", index=0))
    assert view.open_steps == {}
    assert [step.kind for step in view.process_steps] == [StepKind.STEP_KIND_THINKING]


def test_step_without_a_place_gets_the_next_one() -> None:
    """An older producer's steps are kept in the order they came."""
    view = folded(make_step("skill", name="a", index=4), make_step("skill", name="b"), make_step("skill", name="c"))
    assert [(index, step.name) for index, step in view.steps.items()] == [(4, "a"), (5, "b"), (6, "c")]


def test_repeated_seq_is_ignored() -> None:
    """A client that attaches again may be given what it has."""
    view = folded(make_delta("a", seq=1), make_delta("b", seq=2))
    assert view.apply(make_delta("b", seq=2)) is False
    assert view.apply(make_delta("a", seq=1)) is False
    assert (view.text, view.last_seq) == ("ab", 2)
    view.apply(done("ab"))
    assert view.apply(make_delta("b", seq=2)) is False
    assert view.terminal is not None


def test_view_may_begin_anywhere() -> None:
    """The events after some position are folded like any others; events without seq do not move it."""
    view = folded(make_delta("c", seq=7), make_delta("d"), make_delta("e", seq=8))
    assert (view.text, view.last_seq) == ("cde", 8)


def test_event_newer_than_this_code_only_takes_its_place() -> None:
    """It moves the position and says nothing."""
    view = folded(make_delta("a", seq=1), EngineEvent(seq=2), make_delta("b", seq=3))
    assert (view.text, view.last_seq) == ("ab", 3)


def test_open_questions_are_those_of_the_last_interrupt() -> None:
    """They are there while the run is parked, and gone once it goes on."""
    first = make_interrupt([{"id": "i", "kind": "approval"}, {"id": "j", "kind": "question"}])
    rest = make_interrupt([{"id": "j", "kind": "question"}])
    view = folded(first, done("", "interrupted"))
    assert [item.id for item in view.interrupts] == ["i", "j"]
    view.apply(rest)
    assert [item.id for item in view.interrupts] == ["j"]
    view.apply(done("", "interrupted"))
    assert [item.id for item in view.interrupts] == ["j"]
    view.apply(make_delta("on"))
    assert view.interrupts == ()


def test_used_names_are_those_that_were_carried_out() -> None:
    """Distinct, in order of first start; a failure counts unless the tool never ran."""

    def ended(kind: str, name: str, index: int, code: str = "") -> EngineEvent:
        if not code:
            return make_step(kind, name=name, phase="ok", index=index)
        found = {"code": code, "severity": "error", "summary": "s"}
        return make_step(kind, name=name, phase="fail", index=index, diagnosis=found)

    view = folded(
        make_step("skill", name="late", phase="start", index=0),
        ended("skill", "unknown", 1, "tool.unknown"),
        ended("skill", "bad", 2, "tool.bad_arguments"),
        ended("skill", "rejected", 3, "tool.rejected"),
        ended("skill", "skipped", 4, "tool.skipped"),
        ended("skill", "denied", 5, "permission.denied"),
        ended("skill", "failed", 6, "tool.failed"),
        ended("skill", "timeout", 7, "tool.timeout"),
        ended("skill", "ok", 8),
        ended("skill", "ok", 9),
        ended("mcp", "read", 10),
        ended("agent", "helper", 11),
        ended("skill", "late", 0),
        make_step("skill", name="open", phase="start", index=12),
        make_step("thinking", text="t", index=13),
    )
    assert view.used_skills == ["late", "failed", "timeout", "ok"]
    assert view.used_mcp == ["read"]


def test_what_a_view_gives_out_does_not_lead_back_into_it() -> None:
    """Changing the returned collections leaves the view as it is, and folding leaves events as they are."""
    event = make_step("skill", name="n", phase="ok", index=0)
    before = event.SerializeToString()
    view = folded(event)
    view.steps.clear()
    view.process_steps.clear()
    assert len(view.process_steps) == 1
    assert event.SerializeToString() == before


def test_folding_keeps_pieces_until_somebody_reads() -> None:
    """Linear by structure: a delta costs one list entry, a read joins once and is remembered."""
    view = RunView()
    for _ in range(30_000):
        view.apply(make_delta("ab"))
    pieces = view._text._parts
    assert len(pieces) == 30_000
    text = view.text
    assert text == "ab" * 30_000
    assert view._text._parts == [text]
    assert view.text is text
    view.apply(make_delta("c"))
    assert view._text._parts[0] is text
    assert len(view._text._parts) == 2


EVENTS = st.one_of(
    st.builds(make_delta, st.text(max_size=3)),
    st.builds(make_reasoning, st.text(max_size=3)),
    st.builds(make_rewind, st.text(max_size=3), reasoning=st.text(max_size=3)),
    st.builds(
        make_step,
        st.sampled_from(["skill", "mcp", "thinking"]),
        name=st.sampled_from("abc"),
        phase=st.sampled_from(["start", "ok", "fail", ""]),
        index=st.integers(0, 4),
    ),
    st.builds(done),
    st.builds(make_error, st.just("bad")),
)


@calm
@given(st.lists(EVENTS, max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_attaching_again_anywhere_gives_the_same_view(events: list[EngineEvent], cut: int, back: int) -> None:
    """Events given twice, from any position, leave the view as if each had come once."""
    for seq, event in enumerate(events, start=1):
        event.seq = seq
    whole, broken = RunView(), RunView()
    for event in events:
        whole.apply(event)
    for event in [*events[:cut], *events[max(0, cut - back) :]]:
        broken.apply(event)
    assert (broken.text, broken.reasoning, broken.terminal) == (whole.text, whole.reasoning, whole.terminal)
    assert (broken.steps, broken.last_seq) == (whole.steps, whole.last_seq)


@calm
@given(st.lists(EVENTS, max_size=30))
def test_view_is_what_the_plainest_fold_gives(events: list[EngineEvent]) -> None:
    """Text and steps are those of a fold that joins strings and keeps no pieces."""
    text, over, steps = "", False, {}
    view = RunView()
    for event in events:
        view.apply(event)
        text, over = ("", False) if over else (text, over)
        kind = event.WhichOneof("payload")
        if kind == "delta":
            text += event.delta.content
        elif kind == "rewind":
            text = event.rewind.content
        elif kind == "step":
            steps[event.step.index] = event.step.step
        over = kind in ("done", "error")
    assert view.text == text
    assert view.process_steps == [steps[index] for index in sorted(steps)]
