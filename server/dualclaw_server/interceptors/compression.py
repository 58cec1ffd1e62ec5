"""Keeps what a model is given within its context window.

Algorithm, before each model call:

1. Estimate the request: instructions, messages, descriptions of tools and room for the answer (``tokens``). The
   vendor's own count of the last call corrects the estimate, upwards only: too high costs some context, too low
   costs the call.
2. Above ``start`` of the window, or above ``max_messages``, make it smaller, down to ``target`` of either: the
   oldest groups go, then long texts are cut (``window``). The step from one to the other keeps compression rare,
   so that vendors' prompt caches hold in between and a summary is seldom paid for.
3. In front of what is left stands a note, or a summary (``summary``), which is made anew from itself and from what
   went since.

The transcript never changes: what is given to the model from now on is kept in the checkpoint
(``trace.rewrite_context``), also over a resume. Messages that another interceptor added for this call only are
compressed with the others and not kept.

When a vendor refuses a request as too long all the same (CONTEXT_OVERFLOW, known by its code and never by its
words), what is there is brought down to 0.8, 0.6, 0.4, 0.25 of itself, attempt by attempt, until nothing can go. The
window is taken for no larger than what was refused from then on, whatever the model was said to take.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dualclaw import ContentPart, Message, Role
from dualclaw_server.engine.interceptor import Interceptor, Prompt
from dualclaw_server.engine.model import ModelError, ModelResponse
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.summary import COMPRESSION_TEXTS, CompressionStrategy, Trim
from dualclaw_server.interceptors.tokens import TokenCounter, message_tokens, text_tokens, tool_tokens
from dualclaw_server.interceptors.window import Window, cut_text, shrink

log = logging.getLogger(__name__)

HARDER = (0.8, 0.6, 0.4, 0.25)
"""Part of what is there that is left after each refusal."""
LEAST = 0.1
"""Part of the window that messages get at least, however large instructions and tools are."""
ANSWER = 4_096
"""Tokens kept free for the answer when the request does not say how long it may be; at most 1/8 of the window."""
MOST_CORRECTION = 4.0
"""An estimate is never taken for more than this many times too low."""
SMALL = 1_000
"""Requests of fewer tokens correct no estimate: what vendors add to each would weigh too much."""

_USER, _ASSISTANT, _SYSTEM = Role.ROLE_USER, Role.ROLE_ASSISTANT, Role.ROLE_SYSTEM


@dataclass(frozen=True, slots=True)
class _Size:
    """What a request costs, estimated, in tokens as the vendor counts them."""

    window: int
    fixed: int
    messages: int
    correction: float

    @property
    def total(self) -> int:
        return self.fixed + self.messages

    def room(self, part: float) -> int:
        """Return the uncorrected tokens that messages may have when the request is ``part`` of the window."""
        room = max(self.window * part - self.fixed, self.window * LEAST)
        return int(room / self.correction)


class ContextCompressionInterceptor(Interceptor):
    """Compresses the context before it is too long, and after a vendor has said that it is.

    Args:
        start: part of the context window above which it compresses.
        target: part of the window it compresses to; below ``start``.
        context_window: tokens of input and output together; None: as the run's model says.
        max_messages: compresses above this many messages too, to ``target / start`` of them; None: any number.
        strategy: what stands for what is left out: Trim() or Summarise().
        locale: language of the notes.
        order: late by default, after those that choose tools or add to the prompt.

    Raises ValueError for numbers that make no sense together, saying which.
    """

    def __init__(
        self,
        *,
        start: float = 0.75,
        target: float = 0.5,
        context_window: int | None = None,
        max_messages: int | None = None,
        strategy: CompressionStrategy | None = None,
        locale: Locale = "en",
        name: str = "",
        order: int = 100,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = False,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled, switchable=switchable, fail_closed=fail_closed)
        if not 0 < target < start <= 1:
            raise ValueError(f"target must be above 0 and below start, start at most 1; not {target} and {start}")
        if context_window is not None and context_window < 1:
            raise ValueError(f"context_window must be at least 1 token, not {context_window}")
        if max_messages is not None and max_messages < 2:
            raise ValueError(f"max_messages must be at least 2, not {max_messages}")
        self.counter = TokenCounter()
        self._start = start
        self._target = target
        self._context_window = context_window
        self._max_messages = max_messages
        self._strategy = strategy or Trim()
        self._texts = COMPRESSION_TEXTS[locale]
        self._note_id = f"{self.name}/note"
        self._summary_id = f"{self.name}/summary"
        self._bridge_id = f"{self.name}/bridge"

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
        """Compress when the request is above the limits."""
        size = self._size(trace, prompt)
        many = self._max_messages is not None and len(self._real(prompt.messages)) > self._max_messages
        if size.total > size.window * self._start or many:
            await self._compress(trace, prompt, size.room(self._target))
        self._remember(trace, prompt)

    async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        """Compress harder after an overflow; True when anything got smaller."""
        if error.reason != "CONTEXT_OVERFLOW":
            return False
        part = HARDER[min(max(attempt, 1), len(HARDER)) - 1]
        size = self._size(trace, prompt)
        trace.extras(self.name).set("window", min(size.window, size.total))
        there = self.counter.total(prompt.messages)
        changed = await self._compress(trace, prompt, int(there * part))
        self._remember(trace, prompt)
        return changed and self.counter.total(prompt.messages) < there

    async def on_reason_end(self, trace: Trace, response: ModelResponse, message: Message, duration: float) -> None:
        """Compare the estimate of the request with what the vendor counted."""
        extras = trace.extras(self.name)
        estimated = extras.get_as("estimated", int, 0)
        if estimated >= SMALL and response.usage.HasField("input_tokens"):
            extras.set("correction", min(MOST_CORRECTION, max(1.0, response.usage.input_tokens / estimated)))

    # How it works

    def _size(self, trace: Trace, prompt: Prompt) -> _Size:
        extras = trace.extras(self.name)
        window = extras.get_as("window", int, self._context_window or trace.context_window)
        correction = extras.get_as("correction", float, 1.0)
        answer = prompt.options.max_output_tokens or min(ANSWER, window // 8)
        fixed = text_tokens(prompt.instructions) + tool_tokens(prompt.tools)
        messages = self.counter.total(prompt.messages)
        return _Size(window, int(fixed * correction) + answer, int(messages * correction), correction)

    def _remember(self, trace: Trace, prompt: Prompt) -> None:
        """Keep the uncorrected estimate of what is about to be sent."""
        estimated = text_tokens(prompt.instructions) + tool_tokens(prompt.tools) + self.counter.total(prompt.messages)
        trace.extras(self.name).set("estimated", estimated)

    def _real(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages without those made here."""
        made = (self._note_id, self._summary_id, self._bridge_id)
        return [message for message in messages if message.id not in made]

    async def _compress(self, trace: Trace, prompt: Prompt, room: int) -> bool:
        """Make the messages of a prompt, and the context with them, fit ``room``; returns whether anything changed."""
        before = list(prompt.messages)
        real = self._real(before)
        earlier = next((message.parts[0].text for message in before if message.id == self._summary_id), "")
        noted = len(real) < len(before)
        for_summary = self._strategy.room(room)
        window = self._shrink(trace, real, room - self._heading_tokens(earlier, for_summary))
        if not window.gone and not window.cut:
            return False
        summary = earlier
        if window.gone:
            summary = await self._strategy.summarise(trace, window.gone, earlier, for_summary, self._texts)
        if summary != earlier:
            summary = self._within(summary, for_summary)
        after = self._framed(window.kept, summary, noted or bool(window.gone))
        place = {"run_id": trace.key.run_id, "tenant": trace.key.tenant, "agent": trace.agent}
        log.info("context compressed: %d messages left out, %d cut", len(window.gone), window.cut, extra=place)
        known = {message.id for message in trace.context()}
        known.update((self._note_id, self._summary_id, self._bridge_id))
        prompt.messages[:] = after
        trace.rewrite_context([message for message in after if message.id in known])
        return True

    def _shrink(self, trace: Trace, messages: Sequence[Message], room: int) -> Window:
        own = trace.own_messages()
        return shrink(
            messages,
            self.counter,
            tokens=max(0, room),
            count=None if self._max_messages is None else max(1, int(self._max_messages * self._target / self._start)),
            protected={own[0].id} if own else (),
            marker=self._texts.cut,
        )

    # Note and summary

    def _framed(self, kept: Sequence[Message], summary: str, noted: bool) -> list[Message]:
        """Return what is kept with the note or summary behind the system messages that lead it."""
        place = next((place for place, message in enumerate(kept) if message.role != _SYSTEM), len(kept))
        agent_next = place < len(kept) and kept[place].role != _USER
        return [*kept[:place], *self._heading(summary, noted, agent_next), *kept[place:]]

    def _heading(self, summary: str, noted: bool, agent_next: bool) -> list[Message]:
        if not summary:
            return [_message(self._note_id, _USER, self._texts.trimmed)] if noted else []
        heading = [
            _message(self._note_id, _USER, self._texts.summarised),
            _message(self._summary_id, _ASSISTANT, summary),
        ]
        return [*heading, _message(self._bridge_id, _USER, self._texts.goes_on)] if agent_next else heading

    def _heading_tokens(self, earlier: str, for_summary: int) -> int:
        """Return what note and summary may come to."""
        as_it_is = sum(map(message_tokens, self._heading(earlier, True, True)))
        if not for_summary:
            return as_it_is
        return max(as_it_is, for_summary + sum(map(message_tokens, self._heading("-", True, True))))

    def _within(self, summary: str, tokens: int) -> str:
        """Return a summary cut to ``tokens`` when the model did not keep to them."""
        limit = len(summary)
        while text_tokens(summary) > tokens and limit > 1:
            limit = limit * 3 // 4
            summary = cut_text(summary, limit, self._texts.cut)
        return summary


def _message(message_id: str, role: Role.ValueType, text: str) -> Message:
    return Message(id=message_id, role=role, parts=[ContentPart(text=text)])
