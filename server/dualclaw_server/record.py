"""The command ``dualclaw-server record``: asks a model once and keeps its answer, for tests without the vendor.

It writes the body of the HTTP answer as it came, and a note beside it (``FILE.json``): whose it is, what was
asked, how the bytes arrived. A scripted model plays it: ``{"replay": "FILE", "splits": "recorded"}``.

Rules and their reasons:

- No secret gets into either file. Every key the settings know is masked, as it is and in the forms that JSON,
  URLs and base64 give it, and so is whatever reads like an Authorization header. Where the answer spells a key out
  over several events, no mask would fit: nothing is written then.
- Masking may change the length of a line; the sizes of the pieces are moved along, so that they still say where
  every other byte was cut.
- A stream that broke, or ended in an error, is worth keeping too; it is written with a warning. An answer that was
  refused is not: there is nothing to stream.
- Nothing is overwritten unless asked.

Exit codes: 0 written, 1 the model or the files failed, 2 wrong arguments or settings, 130 stopped by Ctrl-C.
"""

import argparse
import asyncio
import base64
import json
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dualclaw import ContentPart, Message, Role
from dualclaw_server.engine.model import ModelError, ModelRequest, ReasoningDelta, TextDelta, ToolSpec
from dualclaw_server.models.api import AnswerFold, Api
from dualclaw_server.models.endpoint import Answer, Endpoint, ModelTimeouts
from dualclaw_server.models.failures import SHORTEST_SECRET, Redactor
from dualclaw_server.models.replay import RecordingNote, note_path
from dualclaw_server.models.sse import EventTooLargeError, SSEReader
from dualclaw_server.models.vendors import Vendor, find_vendor, shipped_vendors
from dualclaw_server.settings import Settings, SettingsError, read_settings

_MOST_BYTES = 64 * 1024 * 1024
_AFTER_END = 2.0
_KEPT_HEADERS = ("content-type", "retry-after", "x-request-id", "request-id")
_EVENT_STREAM = "text/event-stream"
_MASK = "***"


class RecordError(Exception):
    """Nothing could be recorded; the text says why and names no secret."""


@dataclass(slots=True)
class _Take:
    """What was recorded: the pieces, and what a client makes of them."""

    headers: Mapping[str, str]
    pieces: list[bytes] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    failure: str = ""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Record one answer; returns the exit code.

    Args:
        argv: the arguments behind ``record``.
        environ: the process's environment, for the settings.
    """
    options = _parser().parse_args(argv)
    try:
        settings, _ = read_settings(environ, {"model": options.model})
        out = Path(options.out)
        _refuse_to_overwrite(out, force=options.force)
        tools = _read_tools(Path(options.tools)) if options.tools else []
        vendor, name, url = _chosen(settings.model)
        api = vendor.api_of(name)
        encoded_tools = api.tools(tools) if tools else None
        endpoint = _endpoint(settings, vendor, api, name, url)
    except SettingsError as error:
        return _complain(error.problems, 2)
    except (RecordError, ValueError) as error:
        return _complain([str(error)], 2)
    request = ModelRequest(
        [Message(role=Role.ROLE_USER, parts=[ContentPart(text=options.ask)])], instructions=options.instructions
    )
    names = frozenset(tool.name for tool in tools)
    mask = Mask(settings.secrets)
    try:
        body = api.body(request, model=name, tools=encoded_tools, tool_names=names, stream=True)
        take = asyncio.run(_record(endpoint, api, body, mask))
        clean, sizes = mask.pieces(take.pieces)
        note = RecordingNote(
            api=vendor.api,
            vendor=vendor.name,
            model=name,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            headers={key: mask.text(take.headers[key]) for key in _KEPT_HEADERS if key in take.headers},
            chunks=sizes,
            request=msgspec.Raw(mask.text(body.decode()).encode()),
        )
        _write(out, clean, note, force=options.force)
    except (ModelError, RecordError) as error:
        return _complain([mask.text(error.message if isinstance(error, ModelError) else str(error))], 1)
    except KeyboardInterrupt:
        return _complain(["stopped; nothing was written"], 130)
    if take.failure:
        _complain([f"warning: the answer is recorded, but it failed: {take.failure}"], 0)
    item = json.dumps({"replay": out.name, "splits": "recorded"})
    sys.stdout.write(f"{out}: {len(clean)} bytes in {len(sizes)} pieces; in a script beside it: {item}\n")
    return 0


class Mask:
    """Takes secrets out of what is written.

    Args:
        secrets: values that must be in no file.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = [secret for secret in secrets if len(secret) >= SHORTEST_SECRET]
        forms = {form for secret in self._secrets for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._headers = Redactor([])

    def text(self, text: str) -> str:
        """Return the text without secrets, and without what reads like an Authorization header.

        The latter is a guess; where it would turn JSON into something else it is not made.
        """
        for form in self._forms:
            text = text.replace(form, _MASK)
        guessed = self._headers(text)
        return text if guessed != text and _is_json(text) and not _is_json(guessed) else guessed

    def is_spelt_out(self, text: str) -> bool:
        """Return whether a secret stands in a text."""
        return any(secret in text for secret in self._secrets)

    def pieces(self, pieces: Sequence[bytes]) -> tuple[bytes, tuple[int, ...]]:
        """Return the bytes without secrets, and the sizes of their pieces."""
        lines = b"".join(pieces).decode("utf-8", "surrogateescape").splitlines(keepends=True)
        clean: list[bytes] = []
        ends = _ends(pieces)
        moved: list[int] = []
        end = next(ends, None)
        old = new = 0
        for line in lines:
            before = line.encode("utf-8", "surrogateescape")
            after = self.text(line).encode("utf-8", "surrogateescape")
            while end is not None and end <= old + len(before):
                inside = len(after) if end == old + len(before) else min(end - old, len(after))
                moved.append(new + inside)
                end = next(ends, None)
            clean.append(after)
            old += len(before)
            new += len(after)
        sizes = [end - start for start, end in zip([0, *moved], moved, strict=False)]
        return b"".join(clean), tuple(size for size in sizes if size)


def _is_json(line: str) -> bool:
    """Return whether a text, or the data of a line of a stream, is JSON."""
    try:
        json.loads(line.removeprefix("data:"))
    except ValueError:
        return False
    return True


def _ends(pieces: Sequence[bytes]) -> Iterator[int]:
    at = 0
    for piece in pieces:
        at += len(piece)
        yield at


def _forms(secret: str) -> set[str]:
    """Return a secret as others may write it: in JSON, in a URL, in base64."""
    escaped = {json.dumps(secret)[1:-1], secret.replace("/", "\\/")}
    for digits in ("04x", "04X"):
        escaped.add("".join(c if c.isalnum() or c in "-_." else f"\\u{ord(c):{digits}}" for c in secret))
    quoted = {urllib.parse.quote(secret, safe=""), urllib.parse.quote(secret), urllib.parse.quote_plus(secret)}
    coded = base64.b64encode(secret.encode()).decode()
    return {secret, coded, coded.rstrip("="), *escaped, *quoted}


async def _record(endpoint: Endpoint, api: Api, body: bytes, mask: Mask) -> _Take:
    """Ask and read the answer to its end. Raises ModelError, RecordError."""
    try:
        answer = await endpoint.post(body, accept=_EVENT_STREAM, within=endpoint.timeouts.first_token)
        try:
            take = _Take({name.lower(): value for name, value in answer.headers.items()})
            await _read(answer, api.answer(endpoint.redact, frozenset(), ""), take, endpoint.timeouts)
        finally:
            await answer.aclose()
    finally:
        await endpoint.aclose()
    if not take.pieces:
        raise RecordError(take.failure or "the answer is empty")
    if any(mask.is_spelt_out(text) for text in take.said):
        clean, _ = mask.pieces(take.pieces)
        if _still_spelt_out(api, clean, mask, take):
            raise RecordError("the answer spells out a key over several events; nothing was written")
    take.failure = mask.text(take.failure)
    return take


async def _read(answer: Answer, fold: AnswerFold, take: _Take, timeouts: ModelTimeouts) -> None:
    """Read to the end of the body; after the end of the stream itself only so long."""
    listener = _Listener(fold, streamed=_is_stream(take.headers))
    size = 0
    whole = answer.now() + timeouts.whole
    ended: float | None = None
    while True:
        if ended is None and fold.done:
            ended = answer.now() + _AFTER_END
        try:
            data = await answer.read(ended or min(whole, answer.now() + timeouts.idle))
        except TimeoutError:
            if not (fold.done or fold.finished):
                raise RecordError("the model fell silent in the middle of its answer; nothing was written") from None
            break
        except ModelError as error:
            take.failure = error.message
            break
        if data is None:
            break
        take.pieces.append(data)
        size += len(data)
        if size > _MOST_BYTES:
            raise RecordError(f"the answer is larger than {_MOST_BYTES} bytes; nothing was written")
        listener.hear(data)
    listener.end(b"".join(take.pieces))
    take.said, take.failure = listener.said(), take.failure or listener.failure


class _Listener:
    """Folds an answer as the live model does, to know its end and what it says."""

    def __init__(self, fold: AnswerFold, *, streamed: bool) -> None:
        self._fold = fold
        self._reader = SSEReader() if streamed else None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._other: list[str] = []
        self.failure = ""

    def hear(self, data: bytes) -> None:
        """Take one piece of a stream."""
        if self._reader is None or self.failure:
            return
        try:
            for event in self._reader.feed(data):
                self._fold.feed(event)
        except (ModelError, EventTooLargeError) as error:
            self.failure = str(error)
        self._collect()

    def end(self, body: bytes) -> None:
        """Take the end, and the whole body if it was no stream."""
        try:
            if self._reader is None:
                self._fold.feed_body(body.decode("utf-8", "replace"))
            elif not self.failure:
                for event in self._reader.finish():
                    self._fold.feed(event)
            self._fold.end()
            self._collect()
            if not self.failure:
                response = self._fold.response()
                calls = [part.tool_call for part in response.message.parts if part.WhichOneof("part") == "tool_call"]
                self._other += [text for call in calls for text in (call.name, call.args_json)]
                self._other += response.bad_arguments.values()
        except (ModelError, EventTooLargeError) as error:
            self.failure = str(error)

    def said(self) -> list[str]:
        """Return the texts of the answer, each whole."""
        return ["".join(self._text), "".join(self._reasoning), *self._other, self.failure]

    def _collect(self) -> None:
        for delta in self._fold.take():
            match delta:
                case TextDelta():
                    self._text.append(delta.text)
                case ReasoningDelta():
                    self._reasoning.append(delta.text)


def _is_stream(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return not kind.endswith(("json", "html", "xml"))


def _still_spelt_out(api: Api, clean: bytes, mask: Mask, take: _Take) -> bool:
    """Return whether a secret can be read out of the masked answer."""
    listener = _Listener(api.answer(Redactor([]), frozenset(), ""), streamed=_is_stream(take.headers))
    listener.hear(clean)
    listener.end(clean)
    return any(mask.is_spelt_out(text) for text in listener.said())


def _chosen(spec: str) -> tuple[Vendor, str, str]:
    """Return vendor, model and address (empty: the settings' or the vendor's own) of ``VENDOR:NAME[@URL]``."""
    vendor, _, rest = spec.strip().partition(":")
    name, at, url = rest.partition("@http")
    if not name or "," in vendor or "+" in vendor:
        raise RecordError(f"--model must be VENDOR:NAME, one live model, not {spec.partition('@')[0]!r}")
    return find_vendor(shipped_vendors(), vendor.lower()), name, f"http{url}" if at else ""


def _endpoint(settings: Settings, vendor: Vendor, api: Api, name: str, url: str) -> Endpoint:
    address = vendor.address(name, url or settings.model_base_url)
    return Endpoint(
        address,
        api.path,
        vendor.key_for(address, settings.model_api_key.get_secret_value(), settings.keys_for_model),
        timeouts=ModelTimeouts(
            connect=settings.model_timeout_connect,
            first_token=settings.model_timeout_first_token,
            idle=settings.model_timeout_idle,
            whole=settings.model_timeout_whole,
        ),
        auth=api.headers,
        headers=settings.headers_for_model,
    )


def _read_tools(path: Path) -> list[ToolSpec]:
    """Read a JSON list of ``{"name", "description", "parameters"}``, or of OpenAI's ``{"function": {...}}``."""
    try:
        value: object = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"--tools {path} cannot be read: {error}") from None
    tools: list[ToolSpec] = []
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        tool = entry.get("function", entry) if isinstance(entry, dict) else None
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(name, str) or not name:
            raise RecordError(f"--tools {path}: [{number}] must be an object with name, description, parameters")
        parameters = json.dumps(tool.get("parameters", {"type": "object", "properties": {}}))
        tools.append(ToolSpec(name, str(tool.get("description", "")), parameters))
    return tools


def _refuse_to_overwrite(out: Path, *, force: bool) -> None:
    if not out.parent.is_dir():
        raise RecordError(f"--out: there is no folder {out.parent}")
    taken = [str(path) for path in (out, note_path(out)) if path.exists()]
    if taken and not force:
        raise RecordError(f"{' and '.join(taken)} would be overwritten; --force does it")


def _write(out: Path, body: bytes, note: RecordingNote, *, force: bool) -> None:
    """Write the recording, then its note: a note never speaks of bytes that are not there."""
    text = msgspec.json.format(msgspec.json.encode(note), indent=1) + b"\n"
    begun: list[Path] = []
    try:
        for path, data in ((out, body), (note_path(out), text)):
            with path.open("wb" if force else "xb") as file:
                begun.append(path)
                file.write(data)
    except OSError as error:
        for path in begun:
            path.unlink(missing_ok=True)
        raise RecordError(f"{error.filename or out} cannot be written: {error.strerror}") from None


def _complain(lines: Sequence[str], code: int) -> int:
    for line in lines:
        sys.stderr.write(f"dualclaw-server record: {line}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-server record",
        description="Asks a model once and writes its answer as it came, secrets removed, for scripted replay.",
        epilog="Keys, address and timeouts are those of the settings; see dualclaw-server --help.",
    )
    parser.add_argument("--model", metavar="VENDOR:NAME", help="DUALCLAW_MODEL; NAME@URL says the address too")
    parser.add_argument("--ask", metavar="TEXT", required=True, help="the user's message")
    parser.add_argument("--instructions", metavar="TEXT", default="", help="system text")
    parser.add_argument("--tools", metavar="FILE", help='JSON list of {"name", "description", "parameters"}')
    parser.add_argument("--out", metavar="FILE", required=True, help="the recording; FILE.json becomes its note")
    parser.add_argument("--force", action="store_true", help="overwrite")
    return parser
