"""Carries out the commands of a chat."""

from dualclaw.errors import EngineError
from dualclaw_clients.im.approvals import Approvals
from dualclaw_clients.im.commands import Command, Word
from dualclaw_clients.im.connector import ChatKey, Connector
from dualclaw_clients.im.outgoing import Outgoing, outgoing_text
from dualclaw_clients.im.reading import Active, Reader
from dualclaw_clients.im.state import Claim

OVERTAKES = frozenset({Word.CANCEL, Word.APPROVALS, Word.HELP})
"""Commands that do not wait behind the messages before them; /new does, or it would tear a question from its answer."""


class Desk:
    """Answers commands; no message of theirs reaches an agent."""

    def __init__(self, reader: Reader, approvals: Approvals) -> None:
        self._reader = reader
        self._texts = reader.texts
        self._approvals = approvals

    async def carry_out(self, command: Command, connector: Connector, claim: Claim, active: Active | None) -> Outgoing:
        """Do what a command asks for and return what to say.

        Args:
            command: what is asked for.
            connector: where.
            claim: of the command's message.
            active: what is being done for the chat; None: nothing.
        """
        chat = claim.key.chat
        try:
            match command.word:
                case Word.CANCEL:
                    text = await self._cancel(connector, chat, claim.message.user_id, active)
                case Word.NEW:
                    await self._reader.state.save_conversation(chat, "")
                    text = self._texts.begun_anew
                case Word.APPROVALS:
                    return await self._approvals.listing(connector, chat, claim.message.user_id, command.run_id)
                case Word.HELP:
                    text = self._texts.help
        except EngineError as error:
            unknown = error.reason == "UNKNOWN_RUN" and command.run_id
            text = self._texts.run_unknown.format(run=command.run_id) if unknown else self._texts.refused(error)
        return outgoing_text(text, connector.limit)

    async def _cancel(self, connector: Connector, chat: ChatKey, user_id: str, active: Active | None) -> str:
        engine = self._reader.engine_for(connector, chat, user_id)
        run_id = ""
        if active is not None and not active.over:
            active.stopped = True
            run_id = active.run_id
            if not run_id:  # it ends by itself: before it has begun a run, or as soon as it has
                return self._texts.cancelling.format(run="")
        elif conversation_id := await self._reader.state.conversation_of(chat):
            try:
                run_id = (await engine.get_conversation(conversation_id)).active_run_id
            except EngineError as error:
                if error.reason != "UNKNOWN_CONVERSATION":
                    raise
        if not run_id:
            return self._texts.nothing_to_cancel
        await engine.cancel(run_id, "cancelled in the chat")
        return self._texts.cancelling.format(run=run_id)
