"""The adapter for channels that send whole messages: it collects a run and assembles one answer.

The order of an answer, parts one blank line apart: kept reasoning, body, note that it was cut, failure, open
questions, diagnosis lines. A body that is an image or a video stands for itself: the dict goes out with nothing
added, because a channel sends it as media and has no place for text beside it.

Decisions
- The folding is RunView's: a step's last event counts, so a call that failed and went well on a second try under
  the same index leaves no line; events repeated after a reconnect count once.
- Diagnosis lines are those of the steps of this segment. A person who answered a question has already read the
  lines of the segment before.
- A body of white space alone is empty.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from dualclaw import EngineEvent, Severity
from dualclaw.events import diagnosis_text, to_text, to_wire
from dualclaw.fold import RunView
from dualclaw_clients.adapters.base import BaseClawAdapter
from dualclaw_clients.adapters.media import MediaContent, media_content
from dualclaw_clients.adapters.questions import ZH, Wording, questions_text

MAX_BODY: Final = 20_000
"""Characters (code points) of a body; what a person reads in a chat, and a bound for what is sent."""


class BufferAdapter(BaseClawAdapter):
    """Collects the events of a run; ``assemble`` gives what to send. One adapter serves one conversation turn.

    Args:
        keep_reasoning: put the model's reasoning before the answer.
        keep_diagnosis: put the error diagnosis of failed steps behind it.
        numbered_replies: the channel takes numbered replies to open questions; False: none is promised.
        wording: the language of the adapter's own words.
        claw: "im", or the connector's own, such as "im_wechat".
        trace_id, tenant_id: see BaseClawAdapter.

    Attributes:
        view: the run so far, for channels that show more than text, such as buttons for ``view.interrupts``.
    """

    def __init__(
        self,
        *,
        keep_reasoning: bool = False,
        keep_diagnosis: bool = True,
        numbered_replies: bool = True,
        wording: Wording = ZH,
        claw: str = "im",
        trace_id: str = "",
        tenant_id: str = "",
    ) -> None:
        super().__init__(claw=claw, trace_id=trace_id, tenant_id=tenant_id)
        self.keep_reasoning = keep_reasoning
        self.keep_diagnosis = keep_diagnosis
        self.numbered_replies = numbered_replies
        self.wording = wording
        self.view = RunView()
        self._run_id = ""
        # Indexes of the steps this segment has touched, in order; a dict, for its order.
        self._segment_steps: dict[int, None] = {}

    async def deliver(self, event: EngineEvent) -> bool:
        """Fold one event in."""
        kind = event.WhichOneof("payload")
        if kind is None or (kind == "step" and to_wire(event) is None):
            return False
        if event.run_id and event.run_id != self._run_id:
            if self._run_id:
                # Another run counts from 1 again; RunView would take its events for repeated ones.
                self.view = RunView()
                self._segment_steps = {}
            self._run_id = event.run_id
        fresh_segment = self.view.terminal is not None
        next_index = self.view.next_index
        if not self.view.apply(event):
            return True
        if fresh_segment:
            self._segment_steps = {}
        if kind == "step":
            index = event.step.index if event.step.HasField("index") else next_index
            self._segment_steps[index] = None
        return True

    def assemble(self, numbers: Sequence[int] | None = None) -> str | MediaContent:
        """Return the answer so far: text (may be ""), or media that is sent as such. Changes nothing.

        ``numbers``: of the open questions, for a channel that goes on counting; None: from 1.
        """
        terminal = self.view.terminal
        done = terminal.done if terminal is not None and terminal.HasField("done") else None
        body = (done.content if done is not None else "") or self.view.text
        media = media_content(body)
        if media is not None:
            return media

        parts: list[str] = []
        if self.keep_reasoning:
            parts.append(self.view.reasoning)
        questions = questions_text(
            self.view.interrupts, numbered=self.numbered_replies, numbers=numbers, wording=self.wording
        )
        if body.strip():
            parts.append(body[:MAX_BODY])
            if len(body) > MAX_BODY:
                parts.append(self.wording.cut)
        elif done is not None and done.generating and not questions:
            parts.append(self.wording.generating)
        failure = ""
        if terminal is not None and terminal.HasField("error"):
            reason = to_text(terminal)
            failure = reason if reason.strip("❌ ") else self.wording.failed
        parts += (failure, questions)
        if self.keep_diagnosis:
            parts += (line for line in self._diagnosis_lines() if line != failure)
        return _joined(parts)

    def _diagnosis_lines(self) -> Iterable[str]:
        """The distinct error diagnoses of the segment's steps, in order."""
        steps = self.view.steps
        found = (steps[index].diagnosis for index in self._segment_steps)
        return dict.fromkeys(diagnosis_text(one) for one in found if one.severity == Severity.SEVERITY_ERROR)


def _joined(parts: list[str]) -> str:
    parts = [part for part in parts if part.strip()]
    if len(parts) == 1:
        # Alone it stays as it is, so that the answer sent equals the answer given.
        return parts[0]
    return "\n\n".join(part.strip("\r\n") for part in parts)
