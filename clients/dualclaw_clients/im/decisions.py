"""Reads a chat message as answers to numbered questions. Pure: it knows the questions, and no engine.

Rules, and why

- An answer is ``NUMBERS VERDICT [COMMENT]`` for an approval and ``NUMBER TEXT`` for a question; several may stand in
  a message, parted by commas, spaces or lines. ``all VERDICT`` means every approval that was read. Digits and
  punctuation may be full-width, words Chinese or English.
- A number means the one question it was shown with, for ever. Numbers of a chat only rise, so an old number can
  never meet a new question; the engine compares the hash of the arguments besides.
- A verdict counts only if its question was shown before the message was written, with a number too: numbers rise by
  one, so the next one is easily guessed. Without a number exactly one question must be open. Who says "ok" twice
  approves once, also when the run asks something new in between.
- "all" is also how people answer a question ("tea or coffee?" "all fine"), so it decides nothing while a question is
  open that the message does not answer.
- An approval with words behind it is none: "1 ok, once Bob agrees" is asked about instead of being carried out. No
  list of conditions is ever complete, so the list is of what is none: thanks, and a note that is called one
  ("1 ok, note: ticket 5"). Refusing is the safe side, so any reason may stand behind it.
- What was not shown whole cannot be approved, and arguments cannot be edited here.
- All or nothing: if one part of a message is unclear, no part is carried out.
- What does not look like an answer is none, and goes to the agent as the message it is; so does what is longer than
  people write in a reply.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from dualclaw import DecisionAction, InterruptItem, InterruptKind
from dualclaw_clients.adapters.questions import actions_of, is_shown_whole, only_question
from dualclaw_clients.adapters.responses import response_json_of

Action: TypeAlias = DecisionAction.ValueType

APPROVE: Final = DecisionAction.DECISION_ACTION_APPROVE
REJECT: Final = DecisionAction.DECISION_ACTION_REJECT
EDIT: Final = DecisionAction.DECISION_ACTION_EDIT
SKIP: Final = DecisionAction.DECISION_ACTION_SKIP
RESPOND: Final = DecisionAction.DECISION_ACTION_RESPOND

MAX_REPLY: Final = 4_000
"""Characters of a message that is looked at."""

VERDICTS: Final[Mapping[Action, tuple[str, ...]]] = MappingProxyType(
    {
        APPROVE: ("同意", "批准", "通过", "允许", "可以", "确认", "好的", "好", "行", "ok", "okay", "yes", "y",
                  "approve", "approved", "agree", "agreed", "allow"),
        REJECT: ("拒绝", "驳回", "不同意", "不批准", "不通过", "不允许", "不可以", "不行", "不要", "不", "否", "no",
                 "n", "nope", "reject", "rejected", "deny", "denied", "refuse", "refused"),
        SKIP: ("跳过", "skip"),
        EDIT: ("修改", "更改", "改", "edit", "change", "modify"),
        RESPOND: ("回答", "答", "answer", "respond"),
    }
)  # fmt: skip
_WORDS = sorted(((word, action) for action, words in VERDICTS.items() for word in words), key=lambda w: -len(w[0]))
_PARTICLES = re.compile(r"[了吧的啊呀啦~]*")
_THANKS = (
    "thank you", "thanks", "thx", "please", "pls", "go ahead", "do it", "sure", "fine", "good", "great",
    "谢谢", "多谢", "感谢", "谢", "您", "你", "辛苦", "麻烦", "请", "执行", "继续", "办理", "吧", "了", "啦", "哦",
    "👍", "🙏", "✅",
)  # fmt: skip
"""Words behind an approval that say no more than the approval."""
_CONDITION = re.compile(
    r"\b(?:but|if|unless|except|only|not|don.?t|never|wait|after|instead|change|without|no)\b"
    r"|但|不|如果|若|除非|除了|只|仅|别|先|改|等|再|\?"
)
_NOTE = re.compile(r"(?:note|备注|附注)\s*:")
_LIST = r"#?\d{1,9}(?:(?:[\s,&和与]|\band\b)+#?\d{1,9}){0,49}"
_HEAD = re.compile(rf"\s*(?:(?P<numbers>{_LIST})|(?P<all>all(?![a-z])|全部都?|所有都?|都))\s*[.):,]?\s*")
_ONE = re.compile(r"\s*#?(?P<number>\d{1,9})(?:\s*[.):,](?!\d)\s*|\s+)")
_NEXT = re.compile(r"(?<=[\s,;.])(?=#?\d|all|全部|所有|都)")
_LINE = re.compile(r"[^\n]+")
_SEPARATORS = " \t\r,;:.!-—，；：。、！"
_COURTESY = re.compile(
    "(?>"
    + "|".join(sorted(map(re.escape, (*_THANKS, *VERDICTS[APPROVE])), key=len, reverse=True))
    + rf"|[{re.escape(_SEPARATORS)}~\n\ufe0f\U0001f3fb-\U0001f3ff])*+"
)
_NARROW = {ord(c): ord(c) - 0xFEE0 for c in map(chr, range(0xFF01, 0xFF5F))} | {
    0x3000: " ", ord("、"): ",", ord("。"): ".", ord("’"): "'",
} | {ord("①") + n: str(n + 1) for n in range(9)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as a chat was shown it."""

    number: int
    run_id: str
    item: InterruptItem
    is_open: bool = True
    """False: answered, as far as this relay knows; the engine knows better."""
    is_read: bool = True
    """It was shown before the message at hand came."""
    is_listed: bool = False
    """It was shown because somebody asked for what waits, and not in the chat of its run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer."""

    asked: Asked
    action: Action
    response_json: str = ""
    comment: str = ""


class Problem(Enum):
    """Why a message that looks like an answer is none."""

    UNKNOWN = "unknown"
    """No question of the chat has this number."""
    CLOSED = "closed"
    """It has its answer."""
    NO_VERDICT = "no_verdict"
    """An approval was named, and not what is to become of it."""
    NO_TEXT = "no_text"
    """An answer without the words it consists of."""
    CONDITION = "condition"
    """An approval with words that are neither thanks nor a note."""
    EDIT = "edit"
    """Arguments cannot be edited here."""
    NOT_OFFERED = "not_offered"
    """The question does not take this action."""
    NOT_WHOLE = "not_whole"
    """Approved without having been shown whole."""
    TWICE = "twice"
    """One number has two answers."""
    WHICH = "which"
    """A verdict that could mean several questions."""
    UNREAD = "unread"
    """A verdict on a question that was not shown when it was written."""


@dataclass(frozen=True, slots=True)
class Unclear:
    """Nothing is carried out; the person is asked to say it again."""

    problem: Problem
    numbers: tuple[int, ...] = ()


class _Unclear(Exception):
    def __init__(self, problem: Problem, *numbers: int) -> None:
        self.unclear = Unclear(problem, numbers)


@dataclass(slots=True)
class _Entry:
    """Numbers with a verdict, or the number of a question; offsets of the words behind, up to the next entry."""

    numbers: tuple[int, ...]
    """Empty: all."""
    action: Action | None
    """None: the words behind are the answer to a question."""
    start: int
    end: int


def parse_reply(text: str, asked: Sequence[Asked]) -> tuple[Answer, ...] | Unclear | None:
    """Return the answers a message gives, what is unclear about them, or None if it is no answer."""
    if len(text) > MAX_REPLY:
        return None
    narrow = _narrow(text)
    known = {one.number: one for one in asked}
    try:
        entries = list(_entries(narrow, known))
        if not entries:
            return _bare(narrow, asked)
        answers = [answer for entry in entries for answer in _answers(entry, text, known)]
    except _Unclear as found:
        return found.unclear
    numbers = [answer.asked.number for answer in answers]
    asking = [one.number for one in asked if one.is_open and one.item.kind == InterruptKind.INTERRUPT_KIND_QUESTION]
    if any(not entry.numbers for entry in entries) and not set(asking) <= set(numbers):
        return Unclear(Problem.WHICH, tuple(one.number for one in asked if one.is_open))
    if repeated := tuple(sorted({number for number in numbers if numbers.count(number) > 1})):
        return Unclear(Problem.TWICE, repeated)
    return tuple(answers)


def _entries(text: str, known: Mapping[int, Asked]) -> Iterator[_Entry]:
    """Yield the entries of a message in order; none if its first line does not begin with one."""
    current: _Entry | None = None
    for line in _LINE.finditer(text):
        entry = _entry_at(text, line.start(), line.end(), known, has_begun=current is not None)
        if entry is None:
            if current is not None:
                current.end = line.end()  # a reason or an answer of several lines
            elif line[0].strip():
                return
            continue
        while entry is not None:
            if current is not None:
                yield current
            current, entry = entry, _next_entry(text, entry, known)
    if current is not None:
        yield current


def _next_entry(text: str, entry: _Entry, known: Mapping[int, Asked]) -> _Entry | None:
    """Return the entry that begins behind a verdict in the same line, and end the one before it there."""
    if entry.action is None or entry.action == RESPOND:
        return None
    for place in _NEXT.finditer(text, entry.start, entry.end):
        found = _question_entry(text, place.start(), entry.end, known) or _verdict_entry(
            text, place.start(), entry.end, known, has_begun=True
        )
        if found is not None:
            entry.end = place.start()
            return found
    return None


def _entry_at(text: str, start: int, end: int, known: Mapping[int, Asked], *, has_begun: bool) -> _Entry | None:
    question = _question_entry(text, start, end, known)
    if question is not None:
        return question
    found = _verdict_entry(text, start, end, known, has_begun=has_begun)
    if found is not None:
        return found
    head = _HEAD.match(text, start, end)
    if head and head["numbers"]:
        open_ones = [n for n in _numbers(head["numbers"]) if n in known and known[n].is_open]
        alone = head.end() == end
        if open_ones and (alone or _ONE.match(text, start, end)):
            if alone and _is_choice(open_ones, known):
                return None
            raise _Unclear(_what_lacks(known[open_ones[0]]), *open_ones)
    return None


def _question_entry(text: str, start: int, end: int, known: Mapping[int, Asked]) -> _Entry | None:
    """Return the entry of an open question: its number and the answer, which goes to the end of the line."""
    one = _ONE.match(text, start, end)
    asked = known.get(int(one["number"])) if one else None
    if one is None or asked is None or not asked.is_open:
        return None
    if asked.item.kind != InterruptKind.INTERRUPT_KIND_QUESTION:
        return None
    verdict = _verdict_at(text, one.end(), end)
    if verdict and verdict[0] == SKIP and not text[verdict[1] : end].strip(_SEPARATORS):
        return _Entry((asked.number,), SKIP, verdict[1], end)
    return _Entry((asked.number,), None, one.end(), end)


def _is_choice(numbers: Sequence[int], known: Mapping[int, Asked]) -> bool:
    """Return whether a bare number is rather the choice of the only question than a question's number."""
    only = only_question([one.item for one in known.values() if one.is_open])
    return only is not None and all(known[number].item.id == only.id for number in numbers)


def _what_lacks(asked: Asked) -> Problem:
    is_question = asked.item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
    return Problem.NO_TEXT if is_question else Problem.NO_VERDICT


def _verdict_entry(text: str, start: int, end: int, known: Mapping[int, Asked], *, has_begun: bool) -> _Entry | None:
    head = _HEAD.match(text, start, end)
    verdict = _verdict_at(text, head.end(), end) if head else None
    if head is None or verdict is None:
        return None
    if head["all"]:
        return _Entry((), verdict[0], verdict[1], end) if known else None
    numbers = _numbers(head["numbers"])
    if not has_begun and not any(number in known for number in numbers) and not _any_open(known):
        return None  # "3 yes" to an agent that asked in its own words
    return _Entry(numbers, verdict[0], verdict[1], end)


def _verdict_at(text: str, start: int, end: int) -> tuple[Action, int] | None:
    """Return the verdict that begins at an offset, and where it ends."""
    for word, action in _WORDS:
        if not text.startswith(word, start, end):
            continue
        stop = start + len(word)
        if word.isascii():
            is_whole = stop >= end or not (text[stop].isalnum() or text[stop] in "'-_?")
        else:
            particles = _PARTICLES.match(text, stop, end)
            behind = particles.end() if particles else stop
            # Refusing words need no border: "拒绝太贵" refuses. So do those whose text follows at once.
            is_free = (action == REJECT and len(word) > 1) or action in (EDIT, RESPOND)
            is_whole = behind >= end or is_free or not (text[behind].isalnum() or text[behind] == "?")
            stop = behind if is_whole else stop
        if is_whole:
            return action, stop
    return None


def _bare(text: str, asked: Sequence[Asked]) -> tuple[Answer, ...] | Unclear | None:
    """Judge a message without numbers: a verdict and nothing else."""
    begin = len(text) - len(text.lstrip())
    verdict = _verdict_at(text, begin, len(text))
    if verdict is None or text[verdict[1] :].strip(_SEPARATORS + "\n") or verdict[0] == RESPOND:
        return None
    open_ones = [one for one in asked if one.is_open]
    if all(one.item.kind == InterruptKind.INTERRUPT_KIND_QUESTION for one in open_ones) and verdict[0] != SKIP:
        return None  # nothing is open, or only questions, which any words may answer
    if not open_ones:
        return None
    if len(open_ones) > 1:
        return Unclear(Problem.WHICH, tuple(one.number for one in open_ones))
    try:
        return (_checked(open_ones[0], verdict[0], "", ""),)
    except _Unclear as found:
        return found.unclear


def _answers(entry: _Entry, text: str, known: Mapping[int, Asked]) -> Iterator[Answer]:
    said = text[entry.start : entry.end]
    if entry.action is None:
        (number,) = entry.numbers
        answer = said.strip()
        if not answer:
            raise _Unclear(Problem.NO_TEXT, number)
        yield _checked(known[number], RESPOND, answer, "")
        return
    comment = said.strip().strip(_SEPARATORS).strip()
    if entry.action == APPROVE and comment:
        comment = _note(entry, comment, known)
    if not entry.numbers:
        yield from _answers_to_all(entry.action, comment, known)
        return
    for number in entry.numbers:
        asked = known.get(number)
        if asked is None:
            raise _Unclear(Problem.UNKNOWN, number)
        if not asked.is_open:
            raise _Unclear(Problem.CLOSED, number)
        if entry.action == RESPOND:
            if not comment:
                raise _Unclear(Problem.NO_TEXT, number)
            yield _checked(asked, RESPOND, said.strip().lstrip(":：").strip(), "")
        else:
            yield _checked(asked, entry.action, "", comment)


def _answers_to_all(action: Action, comment: str, known: Mapping[int, Asked]) -> Iterator[Answer]:
    open_ones = [one for one in known.values() if one.is_open]
    if action == EDIT:
        raise _Unclear(Problem.EDIT)
    if action == RESPOND:
        raise _Unclear(Problem.WHICH, *(one.number for one in open_ones))
    fitting = [one for one in open_ones if action in actions_of(one.item)]
    if not fitting:
        raise _Unclear(Problem.NOT_OFFERED if open_ones else Problem.CLOSED)
    for one in fitting:
        yield _checked(one, action, "", comment)


def _note(entry: _Entry, comment: str, known: Mapping[int, Asked]) -> str:
    """Return the note behind an approval, empty if there are only thanks; whatever else stands there is a condition."""
    narrow = _narrow(comment)
    if _COURTESY.fullmatch(narrow):
        return ""
    note = _NOTE.match(narrow)
    if note is None or _CONDITION.search(narrow, note.end()):
        raise _Unclear(
            Problem.CONDITION, *(entry.numbers or tuple(number for number, one in known.items() if one.is_open))
        )
    return comment[note.end() :].strip()


def _narrow(text: str) -> str:
    """Return a text in lower case with narrow digits and punctuation, and the same offsets."""
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text).translate(_NARROW)


def _checked(asked: Asked, action: Action, words: str, comment: str) -> Answer:
    if not asked.is_read:
        raise _Unclear(Problem.UNREAD, asked.number)
    if action == EDIT:
        raise _Unclear(Problem.EDIT, asked.number)
    if action not in actions_of(asked.item):
        raise _Unclear(Problem.NOT_OFFERED, asked.number)
    if action == APPROVE and not is_shown_whole(asked.item):
        raise _Unclear(Problem.NOT_WHOLE, asked.number)
    response = response_json_of(words, asked.item.response_schema_json) if action == RESPOND else ""
    return Answer(asked, action, response, comment)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(number) for number in re.findall(r"\d+", text)))


def _any_open(known: Mapping[int, Asked]) -> bool:
    return any(one.is_open for one in known.values())
