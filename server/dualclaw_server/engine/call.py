"""A tool call as interceptors see it: what the model asked for, what it has become, what people said to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualclaw import Decision
from dualclaw.events import parse_args
from dualclaw.json_text import canonical_args
from dualclaw_server.engine.checkpoint import CallPhase, CallState
from dualclaw_server.engine.tool import Tool

if TYPE_CHECKING:
    from dualclaw_server.engine.trace import Trace


class Call:
    """A call of the batch at work; a view of its saved state."""

    def __init__(self, trace: Trace, state: CallState, tool: Tool | None) -> None:
        self._trace = trace
        self.state = state
        self.tool = tool
        """None: the run has no such tool, and the call will fail."""
        self._args: dict[str, object] | None = None

    @property
    def id(self) -> str:
        """Its id, unique in the conversation."""
        return self.state.call.id

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.state.call.name

    @property
    def args(self) -> Mapping[str, object]:
        """Its arguments; to change them use ``change``."""
        if self._args is None:
            self._args = parse_args(self.state.call.args_json)
        return self._args

    @property
    def original_args_json(self) -> str:
        """Arguments as the model wrote them, canonical."""
        return self.state.original_args_json or self.state.call.args_json

    @property
    def args_hash(self) -> str:
        """Hash of name and arguments: what an approval is bound to."""
        text = f"{self.name}\x00{self.state.call.args_json}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def open(self) -> bool:
        """True while it has not run: no result, and not begun."""
        return self.state.phase in (CallPhase.CALL_PHASE_WAITING, CallPhase.CALL_PHASE_SUSPENDED)

    @property
    def decision(self) -> Decision | None:
        """What people last decided about it; None: nothing yet."""
        for question in reversed(self._trace.root.checkpoint.questions):
            if question.call_id == self.id and question.HasField("index") and question.HasField("decision"):
                return question.decision
        return None

    def change(self, args: Mapping[str, object]) -> None:
        """Give it other arguments.

        Raises:
            ValueError: they are no JSON object.
            RuntimeError: the call has begun.
        """
        if not self.open:
            raise RuntimeError(f"call {self.id} of {self.name} has begun; its arguments stay as they are")
        self.take(canonical_args(args))

    def take(self, text: str) -> None:
        """Have these arguments, canonical, from now on, begun or not; for the engine itself."""
        if text == self.state.call.args_json:
            return
        if not self.state.original_args_json:
            self.state.original_args_json = self.state.call.args_json or "{}"
        self.state.call.args_json = text
        self.state.bad_arguments = ""
        self._args = None
