"""The agreement check: streams break everywhere, and what clients read is always what the last attempt said."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualclaw import RetryMode
from dualclaw.events import make_delta, make_reasoning, make_rewind
from dualclaw.fold import RunView
from dualclaw_server.engine.agreement import Action, Shown, Withdraw
from dualclaw_server.engine.model import ReasoningDelta, TextDelta

LIVE = RetryMode.RETRY_MODE_LIVE
HOLD = RetryMode.RETRY_MODE_HOLD
CONTINUE = RetryMode.RETRY_MODE_CONTINUE
BASE, BASE_REASONING, GAP = "Before.", "Thought before.", "\n\n"

Delta = TextDelta | ReasoningDelta

FULL: Sequence[Delta] = (
    ReasoningDelta("想一"),
    ReasoningDelta("想 "),
    TextDelta("Hel"),
    TextDelta("lo "),
    ReasoningDelta("e\u0301"),
    TextDelta("wör"),
    TextDelta("ld 👩\u200d💻"),
)
"""An answer with reasoning before and between, some of it wider than one UTF-16 unit, some of it combining."""


def said_of(kind: type[Delta], deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


class Client:
    """What a client folds, next to what the attempts have truly said."""

    def __init__(self) -> None:
        self.shown = Shown(BASE, BASE_REASONING, GAP)
        self.view = RunView()
        self.view.apply(make_delta(BASE))
        self.view.apply(make_reasoning(BASE_REASONING))
        self.text = self.reasoning = ""
        self.held = False
        self.actions: list[Action] = []
        """Of the present attempt."""

    def begin(self, mode: RetryMode.ValueType) -> None:
        self.shown.begin(mode)
        self.held = mode == HOLD
        self.actions = []
        self.text = self.shown.prefix
        self.reasoning = self.folded[1] if self.text else ""

    def feed(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            actions = self.shown.take(delta)
            self.text += said_of(TextDelta, [delta])
            self.reasoning += said_of(ReasoningDelta, [delta])
            self.carry_out(actions)
            if self.held:
                assert actions == ()
            else:
                text, reasoning = self.folded
                assert text.startswith(self.text)
                assert reasoning.startswith(self.reasoning)
                assert len(actions) <= 1
                if actions and isinstance(actions[0], Withdraw):
                    assert (text, reasoning) == (self.text, self.reasoning)

    def end(self) -> None:
        self.carry_out(self.shown.end())
        assert self.folded == (self.text, self.reasoning)
        assert (self.shown.text, self.shown.reasoning) == self.folded

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert action not in (TextDelta(""), ReasoningDelta(""))
            match action:
                case TextDelta(text=text):
                    self.view.apply(make_delta(text))
                case ReasoningDelta(text=text):
                    self.view.apply(make_reasoning(text))
                case Withdraw(text=text, reasoning=reasoning):
                    self.view.apply(make_rewind(text, reasoning=reasoning))
        self.actions += actions
        assert self.withdraws <= 1, "one rewind per attempt is enough"

    @property
    def withdraws(self) -> int:
        return sum(isinstance(action, Withdraw) for action in self.actions)

    @property
    def folded(self) -> tuple[str, str]:
        """Text and reasoning of this answer as the client has them; the base must be in front of them untouched."""
        text, reasoning = self.view.text, self.view.reasoning
        assert reasoning.startswith(BASE_REASONING)
        assert text == BASE or text.startswith(BASE + GAP)
        return text.removeprefix(BASE).removeprefix(GAP), reasoning.removeprefix(BASE_REASONING)


def broken(*deltas: Delta, mode: RetryMode.ValueType = LIVE) -> Shown:
    """Return what is shown after an attempt that broke after these; the next one has begun."""
    shown = Shown("Base.", "Why.", "\n\n")
    shown.begin(mode)
    for delta in deltas:
        shown.take(delta)
    shown.begin(mode)
    return shown


def recut(deltas: Sequence[Delta], size: int) -> list[Delta]:
    """Return the same in pieces of ``size`` code points, whole kinds at a time."""
    made: list[Delta] = []
    for kind in (ReasoningDelta, TextDelta):
        whole = said_of(kind, deltas)
        made += [kind(whole[start : start + size]) for start in range(0, len(whole), size)]
    return made


def differing() -> list[list[Delta]]:
    """Return the answer once per code point, with that one different."""
    made: list[list[Delta]] = []
    for number, delta in enumerate(FULL):
        for place in range(len(delta.text)):
            changed = list(FULL)
            changed[number] = type(delta)(f"{delta.text[:place]}X{delta.text[place + 1 :]}")
            made.append(changed)
    return made


AGAIN: dict[str, list[list[Delta]]] = {
    "agreeing": [list(FULL)],
    "agreeing, cut differently": [recut(FULL, 1), recut(FULL, 2), recut(FULL, 100)],
    "longer": [[*FULL, TextDelta("!"), ReasoningDelta("so"), TextDelta("?")]],
    "differing": differing(),
    "shorter": [list(FULL[:number]) for number in range(len(FULL))],
    "cut short inside a delta": [[*FULL[:number], type(delta)(delta.text[:1])] for number, delta in enumerate(FULL)],
    "turned to a tool call": [
        [],
        [d for d in FULL if isinstance(d, ReasoningDelta)],
        [ReasoningDelta("I call the tool.")],
    ],
    "without its reasoning": [[d for d in FULL if isinstance(d, TextDelta)]],
}
"""Second attempts, by what is the matter with them."""


@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize("mode", [LIVE, HOLD], ids=["live", "hold"])
def test_a_stream_broken_anywhere_reads_as_its_second_attempt(
    mode: RetryMode.ValueType, again: list[list[Delta]]
) -> None:
    """Broken after every delta and then said anew: the folded text is the new one, withdrawn only where it must be."""
    for count in range(len(FULL) + 1):
        for second in again:
            client = Client()
            client.begin(mode)
            client.feed(FULL[:count])
            assert client.withdraws == 0
            text, reasoning = client.folded
            client.begin(mode)
            client.feed(second)
            client.end()
            assert client.folded == (said_of(TextDelta, second), said_of(ReasoningDelta, second))
            agrees = client.text.startswith(text) and client.reasoning.startswith(reasoning)
            assert client.withdraws == (not agrees), (count, second)
            if agrees:
                sent = "".join(action.text for action in client.actions)
                new = len(client.text) - len(text) + len(client.reasoning) - len(reasoning)
                gap = len(GAP) if client.text and not text else 0
                assert len(sent) == new + gap, "nothing that is shown is sent again"


def test_two_breaks_in_a_row_read_as_the_third_attempt() -> None:
    """Each attempt is compared with what clients have by then, be it of the first or of the second."""
    other = differing()[6]
    for first in range(len(FULL) + 1):
        for second in range(len(FULL) + 1):
            for third in (list(FULL), other, list(FULL[:3]), []):
                client = Client()
                client.begin(LIVE)
                client.feed(FULL[:first])
                client.begin(LIVE)
                client.feed(other[:second])
                text, reasoning = client.folded
                client.begin(LIVE)
                client.feed(third)
                client.end()
                agrees = client.text.startswith(text) and client.reasoning.startswith(reasoning)
                assert client.withdraws == (not agrees), (first, second, third)


@pytest.mark.parametrize(
    "mode", [LIVE, CONTINUE, RetryMode.RETRY_MODE_UNSPECIFIED], ids=["live", "continue", "default"]
)
def test_the_first_token_is_shown_before_the_attempt_is_complete(mode: RetryMode.ValueType) -> None:
    """Consistency costs no time to the first token: each delta of a first attempt goes out as it came."""
    client = Client()
    client.begin(mode)
    client.feed(FULL)
    assert client.actions == [*FULL[:2], TextDelta("\n\nHel"), *FULL[3:]]
    assert client.shown.end() == []


def test_a_held_attempt_is_shown_at_its_end_in_the_order_it_came() -> None:
    """HOLD shows nothing of a broken attempt and all of a complete one, reasoning and text interleaved as said."""
    client = Client()
    client.begin(HOLD)
    client.feed(FULL[:5])
    client.begin(HOLD)
    client.feed(FULL)
    assert client.actions == []
    assert client.folded == ("", "")
    client.end()
    assert client.actions == [
        ReasoningDelta("想一想 "),
        TextDelta("\n\nHello "),
        ReasoningDelta("e\u0301"),
        TextDelta("wörld 👩\u200d💻"),
    ]


def test_an_attempt_that_agrees_is_silent_until_it_goes_beyond() -> None:
    """What is shown is not sent again, and a piece that reaches beyond is sent from there on."""
    shown = broken(TextDelta("Hel"))
    assert shown.take(TextDelta("He")) == ()
    assert shown.take(TextDelta("llo")) == (TextDelta("lo"),)
    assert shown.take(TextDelta("!")) == (TextDelta("!"),)
    assert shown.end() == []


def test_a_difference_is_told_at_once_with_what_the_new_attempt_has_said() -> None:
    """The Withdraw comes with the piece that differs and holds it; what follows is simply added."""
    shown = broken(TextDelta("Hello wor"))
    assert shown.take(TextDelta("Hello ")) == ()
    assert shown.take(TextDelta("you")) == (Withdraw("Base.\n\nHello you", "Why."),)
    assert shown.take(TextDelta("!")) == (TextDelta("!"),)
    assert shown.end() == []


def test_differing_reasoning_takes_unconfirmed_text_with_it() -> None:
    """Text that only the void attempt has said is not shown by the Withdraw, and comes again when it is said again."""
    shown = broken(ReasoningDelta("First "), TextDelta("Yes, "), ReasoningDelta("then"), TextDelta("indeed"))
    shown.take(ReasoningDelta("First "))
    shown.take(TextDelta("Yes"))
    assert shown.take(ReasoningDelta("now")) == (Withdraw("Base.\n\nYes", "Why.First now"),)
    assert shown.take(TextDelta(", indeed")) == (TextDelta(", indeed"),)

    shown.begin(LIVE)
    assert shown.take(ReasoningDelta("Zero")) == (Withdraw("Base.", "Why.Zero"),)
    assert shown.take(TextDelta("No")) == (TextDelta("\n\nNo"),)
    assert shown.end() == []


def test_differing_text_keeps_confirmed_reasoning_only() -> None:
    """Reasoning that the new attempt has not repeated when its text differs goes too, and may come later."""
    shown = broken(ReasoningDelta("I think so"), TextDelta("Yes"))
    shown.take(ReasoningDelta("I think"))
    assert shown.take(TextDelta("No")) == (Withdraw("Base.\n\nNo", "Why.I think"),)
    assert shown.take(ReasoningDelta(" not")) == (ReasoningDelta(" not"),)
    assert shown.end() == []


def test_an_attempt_that_turns_to_tools_withdraws_what_is_left_over_at_its_end() -> None:
    """Shown text that the complete attempt lacks goes, the separator with it; text and reasoning cost one Withdraw."""
    shown = broken(ReasoningDelta("Hm, well"), TextDelta("Hello"))
    assert shown.take(ReasoningDelta("Hm")) == ()
    assert shown.end() == [Withdraw("Base.", "Why.Hm")]
    assert (shown.text, shown.reasoning) == ("", "Hm")


def test_what_was_shown_stays_when_attempts_are_exhausted() -> None:
    """An attempt that broke while it repeated takes nothing away; it is the caller who ends with error."""
    shown = broken(ReasoningDelta("Hm"), TextDelta("Hello"))
    assert shown.take(TextDelta("Hel")) == ()
    assert (shown.text, shown.reasoning) == ("Hello", "Hm")


def test_a_continued_stream_broken_anywhere_loses_and_doubles_nothing() -> None:
    """A model that goes on from the prefix gives the whole text without any Withdraw, for every break and cut."""
    text = said_of(TextDelta, FULL)
    for count in range(len(FULL) + 1):
        for size in (1, 3, 100):
            client = Client()
            client.begin(CONTINUE)
            assert client.shown.prefix == ""
            client.feed(FULL[:count])
            client.begin(CONTINUE)
            prefix = client.shown.prefix
            if not prefix:
                client.feed(FULL)
            else:
                assert text.startswith(prefix)
                client.feed(recut([TextDelta(text[len(prefix) :])], size))
            client.end()
            assert client.folded[0] == text
            assert client.withdraws == 0


def test_a_continuation_may_repeat_the_words_it_goes_on_from() -> None:
    """A model that continues gives what follows only, so words equal to the prefix are new words."""
    shown = broken(TextDelta("ha"), mode=CONTINUE)
    assert shown.prefix == "ha"
    assert shown.take(TextDelta("haha")) == (TextDelta("haha"),)
    shown.end()
    assert shown.replace("hahaha!") == [TextDelta("!")]
    assert shown.prefix == "ha", "the message still lacks it"


def test_a_prefix_has_no_white_space_at_its_end_and_none_is_lost_or_doubled() -> None:
    """Vendors refuse such a prefix; the space that the continuation says again is not shown twice."""
    for rest, actions in (
        (" you", (TextDelta("you"),)),
        (" \n you", (TextDelta("you"),)),
        ("\nyou", (Withdraw("Base.\n\nHello\nyou", "Why.Hm"),)),
        (", you", (Withdraw("Base.\n\nHello, you", "Why.Hm"),)),
    ):
        hello = TextDelta("Hello \n " if "\n " in rest else "Hello ")
        shown = broken(ReasoningDelta("Hm"), hello, mode=CONTINUE)
        assert shown.prefix == "Hello"
        assert shown.take(TextDelta(rest)) == actions
        assert shown.end() == []
        assert shown.text == "Hello" + rest
    shown = broken(TextDelta("Hello "), mode=CONTINUE)
    assert shown.end() == [Withdraw("Base.\n\nHello", "Why.")], "a continuation of nothing"


def test_reasoning_shown_stays_in_a_continuation_and_more_is_added() -> None:
    """Nobody asked the model to think again, so what it thinks now comes after what it thought before."""
    shown = broken(ReasoningDelta("One."), TextDelta("Hel"), mode=CONTINUE)
    assert shown.take(ReasoningDelta(" Two.")) == (ReasoningDelta(" Two."),)
    assert shown.take(TextDelta("lo")) == (TextDelta("lo"),)
    assert shown.end() == []
    assert shown.reasoning == "One. Two."


def test_without_text_to_go_on_from_a_continuation_begins_anew() -> None:
    """Reasoning alone is no prefix: the attempt is compared like any other."""
    shown = broken(ReasoningDelta("One."), mode=CONTINUE)
    assert shown.prefix == ""
    assert shown.take(ReasoningDelta("One.")) == ()
    assert shown.take(ReasoningDelta(" Two.")) == (ReasoningDelta(" Two."),)


def test_another_model_may_begin_anew_in_the_middle_of_a_continuation() -> None:
    """After a restart the answer is compared from its beginning, and no prefix is left."""
    shown = broken(TextDelta("Hello"), mode=CONTINUE)
    shown.take(TextDelta(" you"))
    shown.begin(LIVE)
    assert shown.prefix == ""
    assert shown.take(TextDelta("Hello you")) == ()
    assert shown.take(TextDelta(" all")) == (TextDelta(" all"),)


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("Hello", ()),
        ("Hello you", (TextDelta(" you"),)),
        ("Hell", (Withdraw("Base.\n\nHell", "Why.Hm"),)),
        ("Bye", (Withdraw("Base.\n\nBye", "Why.Hm"),)),
        ("", (Withdraw("Base.", "Why.Hm"),)),
    ],
)
def test_a_replaced_text_goes_on_from_what_is_shown_or_withdraws_it(text: str, actions: Sequence[Action]) -> None:
    """Clients end with the text a hook has made of it, and keep the reasoning."""
    shown = Shown("Base.", "Why.", "\n\n")
    shown.begin(LIVE)
    shown.take(ReasoningDelta("Hm"))
    shown.take(TextDelta("Hello"))
    shown.end()
    assert shown.replace(text) == list(actions)
    assert (shown.text, shown.reasoning) == (text, "Hm")
    assert shown.replace(text) == []
    gap = "" if text else "\n\n"
    assert shown.replace(text + "!") == [TextDelta(gap + "!")]


def test_a_text_where_the_model_said_none_is_set_apart_from_the_base() -> None:
    """A hook may answer in the model's place, before any attempt too."""
    shown = Shown("Base.", "", "\n\n")
    assert shown.replace("") == []
    assert shown.replace("Hello") == [TextDelta("\n\nHello")]


def test_out_of_turn_calls_are_refused_and_change_nothing() -> None:
    """Deltas and ends need an attempt under way, a replaced text a complete one."""
    shown = Shown()
    for delta in (TextDelta("x"), ReasoningDelta("x")):
        with pytest.raises(RuntimeError, match="begin one first"):
            shown.take(delta)
    with pytest.raises(RuntimeError, match="begin one first"):
        shown.end()
    for mode in (LIVE, HOLD):
        shown.begin(mode)
        with pytest.raises(RuntimeError, match="end it before"):
            shown.replace("x")
    shown.take(TextDelta("Hello"))
    assert shown.end() == [TextDelta("Hello")]
    with pytest.raises(RuntimeError, match="begin one first"):
        shown.take(TextDelta("x"))
    assert (shown.text, shown.reasoning) == ("Hello", "")


def test_the_cost_of_long_answers_is_linear() -> None:
    """Two attempts of 200,000 deltas each take a fraction of a second; joining the text per delta takes minutes."""
    shown = Shown("Base.", "", "\n\n")
    piece = "八个字的一段文。"
    start = time.process_time()
    for _ in range(2):
        shown.begin(LIVE)
        for _ in range(200_000):
            shown.take(TextDelta(piece))
    shown.end()
    assert time.process_time() - start < 10
    assert len(shown.text) == 200_000 * len(piece)


PIECES = st.text(alphabet=["的", "🙂", "e", "\u0301", "\u200d", " "], max_size=4)
ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from([LIVE, HOLD, CONTINUE]),
        st.lists(st.builds(TextDelta, PIECES) | st.builds(ReasoningDelta, PIECES), max_size=8),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=4,
)
"""Per attempt: its mode, deltas of its own, and how many deltas of the attempt before it repeats first."""


@given(attempts=ATTEMPTS)
def test_whatever_breaks_the_client_reads_the_last_attempt(
    attempts: list[tuple[RetryMode.ValueType, list[Delta], int]],
) -> None:
    """For any texts, cuts, modes and breaks the fold is the last attempt, with one Withdraw each at most."""
    client = Client()
    before: list[Delta] = []
    for mode, own, repeats in attempts:
        client.begin(mode)
        before = own if client.shown.prefix else recut(before, 3)[:repeats] + own
        client.feed(before)
    client.end()
