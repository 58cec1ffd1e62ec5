"""The guard next to the tools: nothing secret, endless or empty leaves a call.

What happens to an observation, in this order:

1. Of a text too long to be kept, only beginning and end are looked at, and a margin on both sides of the gap is
   left out with it: a credential that the gap has split must not stay as an unknown half.
2. Credentials are masked (``masking``) in texts, in names of media, in summary, detail and hint of the diagnosis
   and in the exception. Masked before it is cut, so that a cut never makes a credential unknown.
3. No text and no media: a note that says so, for models take silence for a fault of theirs.
4. Too long: head and tail, and the whole masked text under a handle (``overflow``).

Media, the error flag and codes stay as they are. All of it changes nothing the second time.

It stands innermost around the tool, so that every other interceptor, event, span and log sees clean text. Results
that come from elsewhere (an interceptor's replacement, an unknown tool's error) are cleaned when their call ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dualclaw import ContentPart, Diagnosis
from dualclaw.events import clean_text, make_diagnosis
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Observation, RunConfig, ToolNext, ToolRequest
from dualclaw_server.engine.outcome import Outcome, Replace
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.tool import NotDone, ToolRaised
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.masking import Masker, MaskingFilter, marker
from dualclaw_server.interceptors.overflow import (
    READ_MORE,
    TEXTS,
    Gap,
    cut,
    gap_in,
    handle_of,
    place_of,
    read_more_tool,
)
from dualclaw_server.interceptors.secrets import CARDS, MAILS, PHONES, RULES, Rule

MAX_KEPT = 200_000
"""Characters of one result that are kept under a handle; also what bounds the time of masking."""
MARGIN = 16_384
"""Characters on both sides of a gap that are left out too; no credential is longer."""
_LEAST = 400
_CHAIN = 10

log = logging.getLogger(__name__)


class ToolSanitizerInterceptor(Interceptor):
    """Masks, cuts and completes what comes out of tools.

    Args:
        max_characters: characters of a result's text, notes included; at least 400. Default 16,000.
        cards: True: payment card numbers are masked too. Default False.
        phones: True: phone numbers. Default False.
        mails: True: mail addresses. Default False.
        rules: further credentials of your own.
        page: True: what is cut can be read with the tool ``read_more``, unless the agent has one of that name or
            no tools at all. Default True.
        locale: language of the notes.
        order: innermost by default (1000), so that everything else sees clean text.

    Raises ValueError for a limit that is too small, or when it is declared switchable: it is a guard.
    """

    guard = True

    def __init__(
        self,
        max_characters: int = 16_000,
        *,
        cards: bool = False,
        phones: bool = False,
        mails: bool = False,
        rules: Sequence[Rule] = (),
        page: bool = True,
        locale: Locale = "en",
        name: str = "",
        order: int = 1000,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = True,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled, switchable=switchable, fail_closed=fail_closed)
        if max_characters < _LEAST:
            raise ValueError(f"max_characters must be at least {_LEAST}, not {max_characters}")
        more = [rule for rule, wanted in ((CARDS, cards), (PHONES, phones), (MAILS, mails)) if wanted]
        self._masker = Masker((*RULES, *more, *rules))
        self._limit = max_characters
        self._kept = max(MAX_KEPT, max_characters)
        self._texts = TEXTS[locale]
        self._read_more = read_more_tool(max_characters, locale) if page else None

    def mask(self, value: object) -> object:
        """Return JSON data masked; whatever stands under a name such as "password" is masked whole."""
        try:
            return self._masker.tree(value)
        except Exception:
            log.exception("data could not be masked and is not shown")
            nothing = marker("unreadable")
            return (
                {"masked": nothing} if isinstance(value, Mapping) else [nothing] if isinstance(value, list) else nothing
            )

    def masking_filter(self) -> MaskingFilter:
        """Return a filter that masks log records; for handlers, since a logger's filter sees only its own records."""
        return MaskingFilter(self._masker.text)

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Let results be as long as they may be here, and add ``read_more`` beside other tools."""
        if config.limits.max_result < self._limit:
            config = replace(config, limits=replace(config.limits, max_result=self._limit))
        taken = any(tool.name == READ_MORE for tool in config.tools)
        paging = self._read_more is not None and bool(config.tools) and not taken
        trace.extras(self.name).set("paging", paging)
        if paging and self._read_more is not None:
            config = replace(config, tools=(*config.tools, self._read_more))
        return config

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        """Clean what the tool gave; see the module."""
        observation = await self._clean(request.trace, await call_next(request))
        if observation.parts:
            return observation
        return replace(observation, parts=(ContentPart(text=self._texts.empty),))

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> Outcome | None:
        """Clean an observation that came from elsewhere than the tool."""
        cleaned = await self._clean(trace, observation)
        return None if _same(cleaned, observation) else Replace(cleaned)

    async def _clean(self, trace: Trace, observation: Observation) -> Observation:
        total = sum(len(part.text) for part in observation.parts)
        parts = (
            self._masked(observation.parts)
            if total <= self._kept + 2 * MARGIN
            else self._masked_ends(observation.parts)
        )
        diagnosis = self._masked_diagnosis(observation.diagnosis)
        text = "".join(part.text for part in parts)
        if len(text) > self._limit:
            gap, note = await self._leave_out(trace, text, max(total, len(text)))
            parts = cut(parts, gap, note)
            if diagnosis is None:
                diagnosis = make_diagnosis(code="result.truncated", severity="info", summary=note.strip("[]"))
        error = None if observation.error is None else self._masked_error(observation.error)
        return replace(observation, parts=tuple(parts), diagnosis=diagnosis, error=error)

    def _masked_ends(self, parts: Sequence[ContentPart]) -> list[ContentPart]:
        """Mask beginning and end of a text that is longer than anything that could be kept of it."""
        text = clean_text("".join(part.text for part in parts))
        head = self._masker.text(text[: self._kept + MARGIN])[:-MARGIN]
        tail = self._masker.text(text[-MARGIN - self._limit :])[MARGIN:]
        media = self._masked([part for part in parts if part.WhichOneof("part") != "text"])
        note = self._texts.cut.format(count=len(text) - len(head) - len(tail))
        ends = [ContentPart(text=f"{head}\n{note}\n"), *media]
        return [*ends, ContentPart(text=tail)] if tail.strip() else ends

    def _masked(self, parts: Sequence[ContentPart]) -> list[ContentPart]:
        texts = self._masker.texts([clean_text(p.text) for p in parts if p.WhichOneof("part") == "text"])
        masked, something = iter(texts), any(text.strip() for text in texts)
        made = []
        for part in parts:
            kind = part.WhichOneof("part")
            if kind == "text":
                text = next(masked)
                if text and something:  # white space between texts keeps them apart: without it they read as one
                    made.append(ContentPart(text=text))
                continue
            media = part.image if kind == "image" else part.file
            name = self._masker.text(media.name) if kind in ("image", "file") else ""
            if name != media.name:
                renamed = ContentPart()
                renamed.CopyFrom(part)
                (renamed.image if kind == "image" else renamed.file).name = name
                made.append(renamed)
            else:
                made.append(part)
        return made

    def _masked_diagnosis(self, diagnosis: Diagnosis | None) -> Diagnosis | None:
        if diagnosis is None:
            return None
        masked = Diagnosis()
        masked.CopyFrom(diagnosis)
        masked.summary = self._masker.text(diagnosis.summary)
        masked.detail = self._masker.text(diagnosis.detail)
        masked.hint = self._masker.text(diagnosis.hint)
        return masked

    def _masked_error(self, error: BaseException) -> BaseException:
        """Return an exception as it is when nothing in it is secret, else one that says the same without."""
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and not any(link is known for known in chain) and len(chain) < _CHAIN:
            chain.append(link)
            link = link.__cause__ or link.__context__
        if all(self._masker.text(_said(link)) == _said(link) for link in chain):
            return error
        text = self._masker.text(f"{type(error).__name__}: {_said(error)}")
        for kind in (NotDone, TimeoutError, ConnectionError):  # what others ask for
            if isinstance(error, kind):
                return kind(text)
        return ToolRaised(text)

    async def _leave_out(self, trace: Trace, text: str, total: int) -> tuple[Gap, str]:
        """Keep a text that is about to be cut; returns what is left out of it and the note in its place.

        ``total`` is its length before anything was done to it.
        """
        kept = text[:MAX_KEPT]
        handle = await self._keep(trace, kept) if trace.extras(self.name).get("paging") else ""
        form = self._texts.cut_kept if handle else self._texts.cut

        def note(left_out: int, offset: int) -> str:
            return form.format(count=left_out, tool=READ_MORE, handle=handle, offset=offset, kept=len(kept))

        room = self._limit - len(note(total, total)) - 2
        gap = gap_in(text, room)
        return gap, note(total - room, gap.head)

    async def _keep(self, trace: Trace, text: str) -> str:
        """Keep a text for ``read_more``; returns its handle, "" when it cannot be kept."""
        handle = handle_of(text)
        try:
            await trace.keep(place_of(trace.key.run_id, handle), text.encode())
        except Exception:
            log.exception("the rest of a long result could not be kept")
            return ""
        return handle


def _said(error: BaseException) -> str:
    """Return an exception's text with its notes, whatever its ``__str__`` does."""
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    except Exception:
        return ""


def _same(one: Observation, other: Observation) -> bool:
    return list(one.parts) == list(other.parts) and one.diagnosis == other.diagnosis and one.error is other.error
