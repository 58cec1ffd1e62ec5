"""What the agent under test must play: the scenarios by name, and what their runs look like whoever plays them.

An implementation in another language offers an agent of this table (by the name ``conformance``, or any other with
``--agent``); ours is ``examples/conformance.py``. The kit relies on nothing else of an agent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ARGS: Final = json.dumps(
    {
        "what": 'quote " slash \\ tab \t 你好 🙂 \u2028',
        "details": {
            "id": 12345678901234567890,
            "half": 0.5,
            "big": 1e16,
            "tiny": 1e-7,
            "none": None,
            "deep": [[{}], []],
        },
    },
    ensure_ascii=False,
)
"""Arguments of the call in ``args``, as they have to arrive."""
ARGS_ESCAPED: Final = ARGS.replace("\u2028", "\\u2028")
"""The same in a frame of the native route."""
EDITED: Final = '{"to": "a", "amount": 7}'
"""Arguments an EDIT gives to ``pay`` in place of ``{"to": "a", "amount": 5}``."""
HELLO: Final = "Hello 你好 🙂"


@dataclass(frozen=True, slots=True)
class Play:
    """One scenario."""

    text: str
    """What the agent has to do, for those who write one."""
    content: str = ""
    """Regular expression of the whole ``done.content`` of the first segment."""
    steps: Sequence[str] = ()
    """Its steps in index order, as ``kind name phase``."""
    ends: str = "FINISHED"
    """Stop reason of the first segment; "error" for an ``error`` event."""


def _words(count: int) -> str:
    return "".join(f"{number:03} " for number in range(count))


PLAYS: Final[Mapping[str, Play]] = {
    "text": Play(
        'one block of reasoning, "A greeting.", then the answer "Hello 你好 🙂"; the model reports 10 tokens in and 5 '
        "out, and nothing of reasoning and cached ones",
        HELLO,
        ("thinking  unspecified",),
    ),
    "tool": Play(
        "one message calls the skill `look`, the mcp tool `fetch` (both end ok) and the skill `fails` (which fails) "
        "side by side; then any answer",
        ".+",
        ("skill look ok", "mcp fetch ok", "skill fails fail"),
    ),
    "args": Play(f"calls `look` with the arguments `{ARGS_ESCAPED}`; then any answer", ".+", ("skill look ok",)),
    "approval": Play(
        'says "One moment. " and calls `pay` with `{"to": "a", "amount": 5}`, which needs approval, as call `pay-a`; '
        '`pay` answers "paid AMOUNT to TO", which the answer repeats; an answer follows a refusal as well',
        "One moment. ",
        ("skill pay start",),
        "INTERRUPTED",
    ),
    "approvals": Play(
        'one message calls `look` and `pay` for "a" and for "b" (calls `pay-a`, `pay-b`); then any answer',
        "",
        (),
        "INTERRUPTED",
    ),
    "question": Play(
        "calls `ask_user`, which asks the user, as call `ask-1`; the answer repeats the response",
        "",
        ("skill ask_user start",),
        "INTERRUPTED",
    ),
    "rewind": Play(
        'shows "This is wrong. ", which is withdrawn by a `rewind`; the answer is "This is right."',
        r"This is right\.",
    ),
    "error": Play('shows "So far ", then the model fails for good with `model.bad_response`', "So far ", (), "error"),
    "slow": Play('the words "000 " to "199 ", one every 50 ms: time to cancel, to attach, to kill', _words(200)),
    "steady": Play('the words "000 " to "119 ", one every 250 ms: time enough for a client that left', _words(120)),
    "long": Play('the words "000 " to "1999 " without a pause', _words(2000)),
    "loop": Play(
        "calls `look` in every step until a limit ends it (5 steps, or max_steps if lower); then any answer",
        ".+",
        ("skill look ok",) * 5,
        "STEP_LIMIT",
    ),
}
