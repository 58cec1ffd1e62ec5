"""A conversation as any vendor accepts it: what the request translators of all wire APIs share.

Rules and their reasons:

- A conversation may move from one API to another in the middle. Sealed and signed reasoning means something to
  the API that made it alone, and another one refuses it or is confused by it. So a signature is stored with the
  API's mark, ``<api>:<signature>``, also when it is empty, and sent only where the mark fits. A part without a
  mark belongs to nobody.
- A call has exactly one result: the first that comes after it. A call without one gets ``NO_RESULT`` when it is
  sent; a result without its call is left out. Strict vendors answer 400 to either.
- A conversation comes in turns: users' messages in a row are one turn; messages with nothing to send are none,
  nor are answers of reasoning alone, which no API takes; SYSTEM messages join the instructions, because most
  vendors want them once and first.
- Call ids are unique over the conversation and fit what the vendor takes. A changed id is made from the old one
  and its place alone, so the same conversation always reads the same: vendors cache by prefix.
"""

import hashlib
import re
import string
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from dualclaw import ContentPart, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw.events import clean_text, diagnosis_text
from dualclaw_server.engine.history import calls_of
from dualclaw_server.engine.model import ModelRequest
from dualclaw_server.models.media import media_note, media_type_of

ApiName = Literal["chat", "responses", "anthropic"]

NO_RESULT = "No result: this call was not completed."

# An enum's value costs a look-up in Python every time it is named.
_SYSTEM, _USER, _ASSISTANT = Role.ROLE_SYSTEM, Role.ROLE_USER, Role.ROLE_ASSISTANT
_ID = re.compile(r"[A-Za-z0-9_-]+")
_SHORT_ID = re.compile(r"[A-Za-z0-9]+")
_DIGITS = string.digits + string.ascii_letters


def mark(api: ApiName, signature: str) -> str:
    """Return the signature as it is stored; an empty one is marked too: sealed blocks have an owner without it."""
    return f"{api}:{signature}"


def signature_for(api: ApiName, part: ReasoningPart | ToolCall) -> str | None:
    """Return the signature as this API gave it, possibly empty; None: the part is another API's, or nobody's."""
    owner, colon, signature = part.signature.partition(":")
    return signature if colon and owner == api else None


def call_ids(messages: Iterable[Message]) -> frozenset[str]:
    """Return the ids of all calls in a conversation."""
    return frozenset().union(*map(calls_of, messages))


def results(messages: Sequence[Message]) -> Mapping[tuple[int, str], ToolResult]:
    """Return each result under (position of the newest message before it that has its call, call id)."""
    owners: dict[str, int] = {}
    found: dict[tuple[int, str], ToolResult] = {}
    for position, message in enumerate(messages):
        for part in message.parts:
            match part.WhichOneof("part"):
                case "tool_call" if message.role == _ASSISTANT:
                    owners[part.tool_call.id] = position
                case "tool_result" if part.tool_result.call_id in owners:
                    call_id = part.tool_result.call_id
                    found.setdefault((owners[call_id], call_id), part.tool_result)
    return found


@dataclass(frozen=True, slots=True)
class CallIds:
    """What a vendor takes as the id of a call."""

    longest: int = 64
    alphabet: Literal["any", "plain", "short"] = "plain"
    """"plain": letters, digits, underscores and dashes; "short": letters and digits, exactly ``longest`` of them
    (Mistral). Some models (Kimi) want their own ids back, which have dots and colons: "any".
    """

    def fits(self, call_id: str) -> bool:
        """Return whether the vendor takes this id."""
        if self.alphabet == "short":
            return len(call_id) == self.longest and _SHORT_ID.fullmatch(call_id) is not None
        return len(call_id) <= self.longest and (self.alphabet == "any" or _ID.fullmatch(call_id) is not None)

    def made_from(self, call_id: str, place: str = "") -> str:
        """Return an id that fits, the same for the same id and place."""
        number = int.from_bytes(hashlib.sha256(f"{call_id}\n{place}".encode()).digest())
        digits: list[str] = []
        for _ in range(self.longest if self.alphabet == "short" else min(self.longest, 24)):
            number, rest = divmod(number, len(_DIGITS))
            digits.append(_DIGITS[rest])
        return "".join(digits)


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call as it is sent: its id for this vendor, and what came of it (None: nothing, so ``NO_RESULT``)."""

    call: ToolCall
    id: str
    result: ToolResult | None


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What users said in a row; ``parts`` has text, images and files, and is never empty."""

    parts: tuple[ContentPart, ...]


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One answer of a model: text or calls at least.

    ``parts`` are all it wrote, in its order; ``calls`` are the calls among them, in the same order. ``latest``: no
    user spoke since, so the model may still be in the middle of its work.
    """

    parts: tuple[ContentPart, ...]
    calls: tuple[SentCall, ...]
    latest: bool

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(part.text for part in self.parts if part.WhichOneof("part") == "text")


Turn = UserTurn | AssistantTurn


def turns(
    messages: Sequence[Message],
    ids: CallIds | None = None,
    *,
    place: int = 0,
    used: Set[str] = frozenset(),
    at_end: bool = True,
) -> list[Turn]:
    """Return the conversation, or a part of it, as its turns, without its system texts.

    Args:
        messages: the conversation, or a part that stands by itself (see ``beginnings``).
        ids: what the vendor takes as call ids.
        place: of the first message in the conversation.
        used: call ids sent before it.
        at_end: False: a user speaks behind it.
    """
    ids = ids or CallIds()
    answers = results(messages)
    sent: set[str] = set()
    newest = max((at for at, message in enumerate(messages) if message.role == _USER), default=-1)
    made: list[Turn] = []
    for at, message in enumerate(messages):
        if message.role == _USER:
            said = tuple(filter(is_said, message.parts))
            before = made[-1] if made else None
            if said and isinstance(before, UserTurn):
                made[-1] = UserTurn((*before.parts, *said))
            elif said:
                made.append(UserTurn(said))
        elif message.role == _ASSISTANT:
            found = [part.tool_call for part in message.parts if part.WhichOneof("part") == "tool_call"]
            # The second of two calls with one id has no result of its own.
            own = {call.id: answers.get((at, call.id)) for call in found}
            calls: list[SentCall] = []
            for number, call in enumerate(found):
                call_id = _sent_id(call.id, f"{place + at} {number}", ids, used, sent)
                calls.append(SentCall(call, call_id, own.pop(call.id, None)))
            turn = AssistantTurn(tuple(message.parts), tuple(calls), latest=at_end and at > newest)
            if calls or turn.text.strip():
                made.append(turn)
    return made


def system_texts(messages: Iterable[Message]) -> list[str]:
    """Return the system texts of a conversation."""
    found = (message for message in messages if message.role == _SYSTEM)
    return [part.text for message in found for part in message.parts if part.WhichOneof("part") == "text"]


def system_text(request: ModelRequest, before: Iterable[str] = ()) -> str:
    """Return the instructions and the system texts of the conversation as one, or empty.

    Args:
        request: the conversation.
        before: system texts of messages that stand before those of the request.
    """
    return clean_text("\n\n".join(filter(None, [request.instructions, *before, *system_texts(request.messages)])))


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with a note in the place of each image, for models that must not be sent any."""
    made: list[Message] = []
    for message in messages:
        copied = Message()
        copied.CopyFrom(message)
        for part in copied.parts:
            _note_images(part)
        made.append(copied)
    return made


def error_text(result: ToolResult) -> str:
    """Return what stands for a failed result that says nothing itself."""
    return diagnosis_text(result.diagnosis) or "The tool failed."


def _note_images(part: ContentPart) -> None:
    kind = part.WhichOneof("part")
    if kind == "tool_result":
        for inner in part.tool_result.parts:
            _note_images(inner)
    elif kind == "image":
        part.text = media_note(part.image, "image")
    elif kind == "file" and media_type_of(part.file, "file").startswith("image/"):
        part.text = media_note(part.file, "image")


def is_said(part: ContentPart) -> bool:
    """Return whether a part is something that a user can say."""
    kind = part.WhichOneof("part")
    return kind in ("image", "file") or (kind == "text" and bool(part.text))


def _sent_id(call_id: str, place: str, ids: CallIds, used: Set[str], sent: set[str]) -> str:
    """Return the id a call is sent with, and note that it is sent."""
    made = call_id if ids.fits(call_id) else ids.made_from(call_id)
    if not call_id or made in sent or made in used:
        made = ids.made_from(call_id, place)
    sent.add(made)
    return made
