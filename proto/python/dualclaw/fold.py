"""Folding a stream of events into what it says so far: one implementation for adapters, engine and tests.

Rules and their reasons:

- A segment's text is its last rewind plus later deltas; the same for its reasoning. Both start afresh with
  the first event after a terminal one, so that until then the finished answer can still be read.
- The last event of a step's index replaces earlier ones whole. Steps live as long as the run.
- A repeated ``seq`` is ignored, because a client that attaches again may be given events it has.
- Tens of thousands of deltas come, so their pieces are kept and joined only when somebody asks.
"""

from __future__ import annotations  # ValueType exists for type checkers only

from dualclaw.v1.event_pb2 import EngineEvent, InterruptItem, Phase, Step, StepKind

NOT_CARRIED_OUT = frozenset(
    {"tool.unknown", "tool.bad_arguments", "tool.rejected", "tool.skipped", "permission.denied"}
)
"""Codes of failed steps that never ran, so their tool does not count as used."""


class _Pieces:
    """Text that grows piece by piece in linear time."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, piece: str) -> None:
        self._parts.append(piece)

    def replace(self, text: str) -> None:
        self._parts = [text]

    def joined(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class RunView:
    """What a run has said so far. Feed it every event in order; read it at any time.

    It keeps references to the messages it is fed and never changes them.
    """

    def __init__(self) -> None:
        self.last_seq = 0
        """Position of the newest event applied; 0 before the first, and for events without a seq."""
        self.terminal: EngineEvent | None = None
        """The ``done`` or ``error`` that ended the segment; None while a segment is open."""
        self.interrupts: tuple[InterruptItem, ...] = ()
        """Open questions; none again once the next segment has begun."""
        self._text = _Pieces()
        self._reasoning = _Pieces()
        self._steps: dict[int, Step] = {}
        self._next_index = 0

    def apply(self, event: EngineEvent) -> bool:
        """Take in the next event. Returns False, and changes nothing, for a seq that was there already.

        An event newer than this code moves ``last_seq`` and says nothing else.
        """
        if event.seq > 0:
            if event.seq <= self.last_seq:
                return False
            self.last_seq = event.seq
        if self.terminal is not None:
            self.terminal = None
            self.interrupts = ()
            self._text, self._reasoning = _Pieces(), _Pieces()
        match event.WhichOneof("payload"):
            case "delta":
                self._text.add(event.delta.content)
            case "reasoning":
                self._reasoning.add(event.reasoning.content)
            case "step":
                # A step without a place (an older producer's) gets the next one.
                index = event.step.index if event.step.HasField("index") else self._next_index
                self._steps[index] = event.step.step
                self._next_index = max(self._next_index, index + 1)
            case "rewind":
                self._text.replace(event.rewind.content)
                self._reasoning.replace(event.rewind.reasoning)
            case "interrupt":
                self.interrupts = tuple(event.interrupt.items)
            case "done" | "error":
                self.terminal = event
            case _:
                pass
        return True

    @property
    def text(self) -> str:
        """The answer of the segment so far."""
        return self._text.joined()

    @property
    def reasoning(self) -> str:
        """The reasoning of the segment so far."""
        return self._reasoning.joined()

    @property
    def steps(self) -> dict[int, Step]:
        """The steps of the run by index, in order of their first event."""
        return dict(self._steps)

    @property
    def process_steps(self) -> list[Step]:
        """The steps of the run in index order, as ``done`` lists them."""
        return [self._steps[index] for index in sorted(self._steps)]

    @property
    def open_steps(self) -> dict[int, Step]:
        """The steps that have started and not ended, by index."""
        return {index: step for index, step in self._steps.items() if step.phase == Phase.PHASE_START}

    @property
    def next_index(self) -> int:
        """The index of the next step."""
        return self._next_index

    @property
    def used_skills(self) -> list[str]:
        """Distinct names of the skill steps that were carried out, in order of first start."""
        return self._used(StepKind.STEP_KIND_SKILL)

    @property
    def used_mcp(self) -> list[str]:
        """Distinct names of the MCP steps that were carried out, in order of first start."""
        return self._used(StepKind.STEP_KIND_MCP)

    def _used(self, kind: StepKind.ValueType) -> list[str]:
        return list(dict.fromkeys(s.name for s in self._steps.values() if s.kind == kind and _carried_out(s)))


def _carried_out(step: Step) -> bool:
    if step.phase == Phase.PHASE_FAIL:
        return step.diagnosis.code not in NOT_CARRIED_OUT
    return step.phase == Phase.PHASE_OK
