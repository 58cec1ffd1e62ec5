"""Carries out numbered replies: who may decide, what exactly they decide, and what they are told.

- Who may chat is one thing, who may approve another: a connector names its approvers. A question may be answered by
  whoever may chat, unless it was shown because an approver listed what waits elsewhere.
- A decision names the question and the hash of its arguments as they were shown. The engine compares both, so what
  has changed, been answered or expired since is refused there, by the one who knows, and told here.
- The ``ResumeRequest``s are stored before they are sent, under request ids made from the reply's key: a redelivered
  reply, or one that a crash interrupts, decides once.
- All decisions about a run are taken or none. If none was, the person sees what is still open.
"""

import base64
import hashlib
import json
from collections.abc import Sequence

from dualclaw import Decision, InterruptKind, ListRunsRequest, ResumeRequest, Run, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw_clients.adapters.questions import questions_text, visible
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable
from dualclaw_clients.im.connector import EVERYBODY, ChatKey, Connector, MessageKey
from dualclaw_clients.im.decisions import Answer, Asked, Unclear, parse_reply
from dualclaw_clients.im.outgoing import Outgoing, joined, outgoing_text
from dualclaw_clients.im.reading import Active, NoAnswer, Reader
from dualclaw_clients.im.state import Claim

PAGE = 10
"""Runs that are listed at once."""


def may_approve(connector: Connector, user_id: str) -> bool:
    """Return whether a person may decide what runs ask to be allowed."""
    return EVERYBODY in connector.approvers or user_id in connector.approvers


def resume_id_of(key: MessageKey, run_id: str) -> str:
    """Return the request_id of a reply's decisions about a run: the same in every process that sees the reply."""
    place = [key.chat.platform, key.chat.bot, key.chat.chat_id, key.message_id, run_id]
    return "im-reply-" + hashlib.sha256(json.dumps(place).encode()).hexdigest()


class Approvals:
    """Reads replies and resumes runs."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._state = reader.state
        self._texts = reader.texts

    async def reply(self, connector: Connector, claim: Claim, active: Active) -> Outgoing | None:
        """Carry out a message that answers numbered questions; None if it is none.

        Raises:
            NoAnswer: the engine cannot be reached, or refused for a reason that is no fault of the reply.
            StateError: the decisions could not be stored, so none was given.
        """
        key, user_id = claim.key, claim.message.user_id
        if claim.resumes:
            requests = _load(claim.resumes)
        else:
            asked = await self._state.asked(key.chat, claim.arrival)
            found = parse_reply(claim.message.text, asked) if asked else None
            if found is None:
                return None
            if isinstance(found, Unclear):
                return await self._ask_again(connector, key.chat, self._texts.unclear(found), asked)
            if not may_approve(connector, user_id) and (guarded := [a for a in found if _is_guarded(a.asked)]):
                text = self._texts.may_not_approve.format(run=guarded[0].asked.run_id)
                return outgoing_text(text, connector.limit)
            requests = _requests(key, found)
            await self._state.save_resumes(key, _dump(requests))
        engine = self._reader.engine_for(connector, key.chat, user_id)
        return joined([await self._resume(connector, claim, engine, request, active) for request in requests])

    async def listing(self, connector: Connector, chat: ChatKey, user_id: str, run_id: str = "") -> Outgoing:
        """Return what waits for a decision in the tenant, or in one run, numbered for this chat.

        Raises EngineError.
        """
        if not may_approve(connector, user_id):
            return outgoing_text(self._texts.may_not_approve.format(run=run_id or "-"), connector.limit)
        engine = self._reader.engine_for(connector, chat, user_id)
        if run_id:
            runs, more = [await engine.get_run(run_id)], False
            if runs[0].state != RunState.RUN_STATE_INTERRUPTED:
                return outgoing_text(self._texts.run_waits_not.format(run=run_id), connector.limit)
        else:
            page = await engine.list_runs(ListRunsRequest(page_size=PAGE, states=[RunState.RUN_STATE_INTERRUPTED]))
            runs, more = list(page.runs), bool(page.next_page_token)
        parts, numbers = [self._texts.approvals], list[int]()
        for run in runs:
            listed = await self._state.number(chat, run.id, run.interrupts, listed=True)
            numbers += listed
            head = self._texts.run.format(run=run.id, agent=visible(run.agent), claw=visible(run.claw) or "-")
            parts += [head, questions_text(run.interrupts, numbers=listed, wording=self._texts.wording)]
        if not numbers:
            return outgoing_text(self._texts.no_approvals, connector.limit)
        if more:
            parts.append(self._texts.more_approvals)
        return outgoing_text("\n\n".join(parts), connector.limit, numbers)

    async def _resume(
        self, connector: Connector, claim: Claim, engine: EngineClient, request: ResumeRequest, active: Active
    ) -> Outgoing:
        active.run_id = request.run_id

        async def go_on() -> Outgoing:
            stream = engine.resume(request, timeout=self._reader.run_timeout)
            return await self._reader.segment(connector, claim, stream, active)

        try:
            return await self._reader.within_reach(go_on, active)
        except EngineUnreachable as error:
            raise NoAnswer(self._texts.refused(error), str(error), begun=True, follow=request.run_id) from error
        except EngineError as error:
            text = self._refusal(request, error)
            if not text:
                cause = f"{error.reason}: {error.message}"
                raise NoAnswer(self._texts.refused(error), cause, begun=True) from error
            return await self._still_open(connector, claim.key.chat, engine, request.run_id, text)

    def _refusal(self, request: ResumeRequest, error: EngineError) -> str:
        """Return what to say when the engine did not take decisions; empty if another try may help."""
        run_id = visible(request.run_id)
        match error.reason:
            case "ALREADY_ANSWERED" | "UNKNOWN_INTERRUPT":
                return self._texts.answered_already
            case "RUN_NOT_INTERRUPTED":
                return self._texts.run_waits_not.format(run=run_id)
            case "UNKNOWN_RUN":
                return self._texts.run_unknown.format(run=run_id)
            case "INVALID_REQUEST":
                fields = error.fields if isinstance(error, FieldError) else {}
                if any(name.endswith(".args_hash") for name in fields):
                    return self._texts.changed
                return self._texts.refused_answer.format(problem="; ".join(fields.values()) or error.message)
        return ""

    async def _still_open(
        self, connector: Connector, chat: ChatKey, engine: EngineClient, run_id: str, text: str
    ) -> Outgoing:
        """Return why nothing was decided, and what the run still asks."""
        try:
            run = await engine.get_run(run_id)
        except EngineError:
            run = Run()
        items = run.interrupts if run.state == RunState.RUN_STATE_INTERRUPTED else []
        await self._state.close_others(chat, run_id, items)
        if not items:
            return outgoing_text(text, connector.limit)
        numbers = await self._state.number(chat, run_id, items, listed=True)
        asked = questions_text(items, numbers=numbers, wording=self._texts.wording)
        return outgoing_text("\n\n".join((text, self._texts.still_open, asked)), connector.limit, numbers)

    async def _ask_again(self, connector: Connector, chat: ChatKey, text: str, asked: Sequence[Asked]) -> Outgoing:
        open_ones = [one for one in asked if one.is_open][-PAGE:]
        if not open_ones:
            return outgoing_text(text, connector.limit)
        numbers = [one.number for one in open_ones]
        again = questions_text([one.item for one in open_ones], numbers=numbers, wording=self._texts.wording)
        return outgoing_text("\n\n".join((text, self._texts.still_open, again)), connector.limit, numbers)


def _is_guarded(asked: Asked) -> bool:
    return asked.is_listed or asked.item.kind != InterruptKind.INTERRUPT_KIND_QUESTION


def _requests(key: MessageKey, answers: Sequence[Answer]) -> list[ResumeRequest]:
    by_run: dict[str, ResumeRequest] = {}
    for answer in answers:
        run_id, item = answer.asked.run_id, answer.asked.item
        request = by_run.setdefault(run_id, ResumeRequest(run_id=run_id, request_id=resume_id_of(key, run_id)))
        request.decisions.append(
            Decision(
                interrupt_id=item.id,
                action=answer.action,
                args_hash=item.args_hash,
                response_json=answer.response_json,
                comment=answer.comment,
            )
        )
    return list(by_run.values())


def _dump(requests: Sequence[ResumeRequest]) -> bytes:
    return json.dumps([base64.b64encode(request.SerializeToString()).decode() for request in requests]).encode()


def _load(stored: bytes) -> list[ResumeRequest]:
    return [ResumeRequest.FromString(base64.b64decode(text)) for text in json.loads(stored)]
