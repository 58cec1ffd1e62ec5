"""Reads a choice written as JSON while it is being written: a tool with its arguments, or an answer.

Rules and their reasons:

- The text is one JSON object, ``{"tool": NAME, "arguments": {...}}`` or ``{"answer": TEXT}``, alone or in a code
  fence; what follows it is not looked at. Text that begins with anything else is the answer as it stands: an
  endpoint may not know schemas, and its plain reply is worth more than an error.
- The answer is decoded as it arrives. An escape, or half of a surrogate pair, waits for its other half; a half
  that never finds it is U+FFFD. The first answer of the object is the one that is shown, so it counts.
- An object that is broken, was cut off, or chooses nothing cannot be run and must not be shown as text:
  MODEL_BAD_RESPONSE, which another attempt may cure. Only an answer that was cut off because the tokens ran out
  stands as it is, as it would with any other model, and what a filter has cut off says so by its finish reason.
- An answer that must fit a schema of its own is a JSON value and is given whole, at the end.
"""

import json
import re

from dualclaw import ContentPart
from dualclaw.events import canonical_json
from dualclaw_server.engine.model import FinishReason, ModelError, TextDelta
from dualclaw_server.models.written.tool_text import WrittenCall

TOOL, ARGUMENTS, ANSWER = "tool", "arguments", "answer"

_WHITESPACE = " \t\r\n"
_FENCE = "```"
_FENCES = ("```", "```json")
_RUN = re.compile(r'[^"\\]+')
_LENIENT = json.JSONDecoder(strict=False)  # a line break inside a string is wrong, and means nothing else
_EXCERPT = 200


class ChoiceReader:
    """Reads one message. ``feed`` pieces of text, ``add`` parts that are none, then ``end``.

    Args:
        structured: the answer is a JSON value that fits a schema, and is given as its JSON.
    """

    cut = False
    """A constrained model ends by itself, so the rest of its stream, usage included, is read."""

    def __init__(self, *, structured: bool = False) -> None:
        self._structured = structured
        self._parts: list[ContentPart] = []
        self._blank: list[str] = []
        self._held = ""
        self._plain = False
        self._object: _Scanner | None = None
        self._text: list[str] = []
        self._call: WrittenCall | None = None
        self._error: ModelError | None = None

    def feed(self, piece: str) -> list[TextDelta]:
        """Take the next piece; return the text of the answer that is sure by then."""
        if self._plain:
            return self._give(piece)
        if self._object is None:
            if not self._held and not piece.strip(_WHITESPACE):
                self._blank.append(piece)
                return []
            self._held += piece
            return self._begin()
        return self._give(self._object.feed(piece))

    def add(self, part: ContentPart) -> None:
        """Take a part that is no text; it stands before the text."""
        self._parts.append(part)

    def end(self, finish: FinishReason) -> list[TextDelta]:
        """Give back what was held and decide what was chosen; the message is over."""
        if self._object is None:
            return self._give(self._take_held())
        found = self._give(self._object.flush())
        try:
            value, _ = _LENIENT.raw_decode(self._object.raw())
        except (ValueError, RecursionError):
            stands = finish == "length" and (self._object.answering or self._text)
            if not stands and finish != "content_filter":
                self._fail("is broken or was cut off")
            return found
        name, arguments, answer = value.get(TOOL), value.get(ARGUMENTS), value.get(ANSWER)
        if isinstance(name, str) and name:
            self._call = WrittenCall(name, _arguments(arguments))
        elif not (self._text or ANSWER in value):
            self._fail(f'has neither "{TOOL}" nor "{ANSWER}"')
        shown = self._text or (isinstance(answer, str) and not self._structured)
        if shown or ANSWER not in value or (answer is None and not self._structured):
            return found
        return [*found, *self._give(json.dumps(answer, ensure_ascii=False))]

    def blocks(self) -> list[ContentPart | WrittenCall]:
        """Return what the message holds: other parts, the answer, the call.

        Raises:
            ModelError: MODEL_BAD_RESPONSE, the object is broken, was cut off, or chooses nothing.
        """
        if self._error is not None:
            raise self._error
        blocks: list[ContentPart | WrittenCall] = [*self._parts]
        if self._text:
            blocks.append(ContentPart(text="".join(self._text)))
        if self._call is not None:
            blocks.append(self._call)
        return blocks

    def _begin(self) -> list[TextDelta]:
        """Decide whether the text is an object, as soon as that can be seen."""
        bare = self._held.lstrip(_WHITESPACE)
        if bare.startswith(_FENCE) and "\n" in bare:
            line, _, below = bare.partition("\n")
            if line.strip().lower() in _FENCES:
                bare = below.lstrip(_WHITESPACE)
        if not bare or ("\n" not in bare and _FENCES[-1].startswith(bare.rstrip().lower())):
            return []
        held = self._take_held()
        if not bare.startswith("{"):
            self._plain = True
            return self._give(held)
        self._object = _Scanner(decode=not self._structured)
        return self._give(self._object.feed(bare))

    def _take_held(self) -> str:
        held, self._blank, self._held = "".join([*self._blank, self._held]), [], ""
        return held

    def _give(self, text: str) -> list[TextDelta]:
        if not text:
            return []
        self._text.append(text)
        return [TextDelta(text)]

    def _fail(self, what: str) -> None:
        raw = " ".join(self._object.raw().split()) if self._object is not None else ""
        self._error = ModelError(
            "MODEL_BAD_RESPONSE",
            f"The model's choice of a tool or an answer {what}.",
            retryable=True,
            detail=raw if len(raw) <= _EXCERPT else raw[: _EXCERPT - 1] + "…",
            hint="An endpoint that holds answers to response_format json_schema does not give such a thing.",
        )


class _Scanner:
    """Follows one JSON object and decodes the string under "answer" in it as it arrives.

    It looks at structure alone; whether the whole is JSON is for a parser to say, at the end.
    """

    def __init__(self, *, decode: bool) -> None:
        self._decode = decode
        self._raw: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_key = False
        self._key: list[str] = []
        self._last_key = ""
        self._escape = ""
        self._high = ""
        self._seen = False
        self._over = False
        self.answering = False
        """Inside the answer's string."""

    def raw(self) -> str:
        """Return the text so far."""
        return "".join(self._raw)

    def feed(self, text: str) -> str:
        """Take more of the object; return what it adds to the answer."""
        self._raw.append(text)
        shown: list[str] = []
        at = 0
        while at < len(text) and not self._over:
            if not self._in_string:
                self._structure(text[at])
                at += 1
            elif self._escape:
                self._escape += text[at]
                at += 1
                self._end_escape(shown)
            elif (run := _RUN.match(text, at)) is not None:
                self._take(run.group(), shown)
                at = run.end()
            else:
                if text[at] == '"':
                    self._end_string(shown)
                else:
                    self._escape = "\\"
                at += 1
        return "".join(shown)

    def flush(self) -> str:
        """Return what half a surrogate pair has become; the text is over."""
        high, self._high = self._high, ""
        return "\ufffd" if high else ""

    def _structure(self, character: str) -> None:
        match character:
            case '"':
                self._in_string = True
                self._key.clear()
                wanted = self._depth == 1 and not self._is_key and self._last_key == ANSWER
                self.answering = wanted and self._decode and not self._seen
                self._seen = self._seen or wanted
            case "{" | "[":
                self._depth += 1
                self._is_key = self._depth == 1
            case "}" | "]":
                self._depth -= 1
                self._over = self._depth == 0
            case "," if self._depth == 1:
                self._is_key = True
            case ":" if self._depth == 1:
                self._is_key = False

    def _take(self, run: str, shown: list[str]) -> None:
        if self.answering:
            shown += [self.flush(), run]
        elif self._depth == 1 and self._is_key:
            self._key.append(run)

    def _end_string(self, shown: list[str]) -> None:
        if self.answering:
            shown.append(self.flush())
        elif self._depth == 1 and self._is_key:
            self._last_key = "".join(self._key)
        self._in_string = self.answering = False

    def _end_escape(self, shown: list[str]) -> None:
        """Take an escape once it is whole: a character, or half of a surrogate pair."""
        if len(self._escape) < (6 if self._escape[1] == "u" else 2):
            return
        escape, self._escape = self._escape, ""
        try:
            character = str(json.loads(f'"{escape}"'))
        except ValueError:
            self.answering = False  # no JSON, so nothing of it counts
            return
        if not self.answering:
            self._take(character, shown)
        elif "\ud800" <= character <= "\udbff":
            shown.append(self.flush())
            self._high = character
        elif "\udc00" <= character <= "\udfff":
            high, self._high = self._high, ""
            pair = (high + character).encode("utf-16", "surrogatepass").decode("utf-16") if high else "\ufffd"
            shown.append(pair)
        else:
            self._take(character, shown)


def _arguments(value: object) -> str:
    match value:
        case None:
            return "{}"
        case str():
            return value
        case dict():
            return canonical_json(value)
    return json.dumps(value, ensure_ascii=False)
