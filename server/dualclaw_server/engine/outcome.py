"""Outcomes: what a hook or a tool can want instead of simply going on.

A hook returns one; where the return value is taken (``intercept_tool``, ``intercept_stream``,
``intercept_call``, tools) the same object is raised. Returning None, or nothing special, means: continue.

Outcome
  Replace   go on with this value instead
  Suspend   ask people, and park the run until they have answered
  End       end the run well, with this answer and this stop reason
  Fail      end the run with this error
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import jsonschema

from dualclaw import StopReason
from dualclaw.errors import EngineError

Action = Literal["approve", "reject", "edit", "skip", "respond"]
StopName = Literal["finished", "budget_exceeded", "loop_detected", "rejected", "exited"]

APPROVAL_ACTIONS: tuple[Action, ...] = ("approve", "reject", "edit", "skip", "respond")
QUESTION_ACTIONS: tuple[Action, ...] = ("respond", "skip")


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing to ask people.

    Raises ValueError when it has no prompt, an unknown kind or action, a schema that is none, or an expiry without
    a time zone.
    """

    prompt: str
    """What people read."""
    kind: Literal["approval", "question"] = "approval"
    call_id: str = ""
    """The call it is about; empty: the run itself, or, raised in a tool, the tool's own call."""
    allowed: Sequence[Action] = ()
    """Answers that are taken; none given: all for an approval, respond and skip for a question."""
    response_schema: str = ""
    """JSON schema, as JSON text, that a response must fit; empty: any JSON value."""
    expire_time: datetime | None = None
    """When it counts as rejected (skipped, if it cannot be rejected); aware of its time zone. None: never."""
    reject_ends_run: bool = False
    """True: a rejection ends the run with REJECTED; else the model is told."""
    key: str = ""
    """Tells several questions about one call, or about the run, apart; the same question has the same key."""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("a question needs a prompt")
        if not self.allowed:
            allowed = APPROVAL_ACTIONS if self.kind == "approval" else QUESTION_ACTIONS
            object.__setattr__(self, "allowed", allowed)
        if self.kind not in ("approval", "question"):
            raise ValueError(f"kind {self.kind!r}: use approval or question")
        if isinstance(self.allowed, str) or (unknown := set(self.allowed) - set(APPROVAL_ACTIONS)):
            wrong = self.allowed if isinstance(self.allowed, str) else ", ".join(map(str, unknown))
            raise ValueError(f"allowed: {wrong} is not among {', '.join(APPROVAL_ACTIONS)}")
        if "/" in self.key or "#" in self.key:
            raise ValueError(f"key {self.key!r} must be without / and #, which set ids of questions apart")
        if self.response_schema:
            try:
                jsonschema.Draft202012Validator.check_schema(json.loads(self.response_schema))
            except (ValueError, jsonschema.SchemaError) as error:
                raise ValueError(f"response_schema is no JSON schema: {error}") from None
        if self.expire_time is not None and self.expire_time.tzinfo is None:
            raise ValueError("expire_time must be aware of its time zone")


class Outcome(Exception):
    """What is wanted instead of going on."""

    origin = ""
    """Name of the interceptor it comes from; filled in by the engine."""


class Replace(Outcome):
    """Go on with another value; what it must be, each hook says. Ends the hook for the interceptors after it."""

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value


class Suspend(Outcome):
    """Ask people and park the run. At least one question."""

    def __init__(self, *asks: Ask) -> None:
        super().__init__(*asks)
        if not asks:
            raise ValueError("a suspension needs at least one question")
        self.asks = asks


class End(Outcome):
    """End the run: ``text`` is shown as its answer (empty: what was shown so far is the answer)."""

    def __init__(self, text: str = "", stop_reason: StopName = "finished") -> None:
        super().__init__(text, stop_reason)
        self.text = text
        self.stop_reason: StopReason.ValueType = StopReason.Value(f"STOP_REASON_{stop_reason.upper()}")


class Fail(Outcome):
    """End the run with an error event."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error)
        self.error = error


def stop_name(stop_reason: StopReason.ValueType) -> str:
    """Return a stop reason in lower case, as events are made with it."""
    return StopReason.Name(stop_reason).removeprefix("STOP_REASON_").lower()
