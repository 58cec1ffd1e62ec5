"""What makes a request well-formed; the one place that says so.

Every check of a request is made and all violations are told at once, by the field's path in the request.
Limits are in bytes of UTF-8, so that every language counts alike. What only the engine can know (unknown
agent, a model outside the agent's list) is not checked here.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Final, Protocol

from dualclaw import (
    AttachRequest,
    BusyPolicy,
    CancelRequest,
    ContentPart,
    DecisionAction,
    DisconnectPolicy,
    ListRunsRequest,
    Media,
    RememberScope,
    ResumeRequest,
    RetryMode,
    RetryRunRequest,
    Role,
    RunOptions,
    RunRequest,
    RunState,
    SetInterceptorEnabledRequest,
)
from dualclaw.errors import FieldError

MAX_ID: Final = 128
MAX_NAME: Final = 256
MAX_CLAW: Final = 64
MAX_REQUEST_ID: Final = 256
MAX_TEXT: Final = 1 << 20
"""All text of a message together."""
MAX_MEDIA: Final = 12 << 20
"""All bytes of a message's images and files together."""
MAX_PARTS: Final = 64
MAX_URL: Final = 8_192
MAX_PAIRS: Final = 64
MAX_VALUE: Final = 4_096
MAX_REASON: Final = 4_096
MAX_ANSWER: Final = 256 << 10
"""The arguments or the response in a decision."""
MAX_INTERRUPT_ID: Final = 1_024
MAX_TOKEN: Final = 1_024
DEFAULT_PAGE: Final = 50
MAX_PAGE: Final = 500


class _Enum(Protocol):
    def values(self) -> Iterable[int]: ...


class _Faults:
    """Collects what is wrong with a request."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def add(self, field: str, problem: str) -> None:
        """Note a violation; the first one of a field is told."""
        self._fields.setdefault(field, problem)

    def text(self, field: str, value: str, limit: int, *, required: bool = False) -> None:
        """Check a short text: present if it must be, not too long, nothing unprintable in it."""
        if required and not value:
            self.add(field, "is missing")
        elif len(value.encode()) > limit:
            self.add(field, f"has more than {limit} bytes")
        elif not value.isprintable():
            self.add(field, "has control characters")

    def enum(self, field: str, value: int, enum: _Enum) -> None:
        """Check that the number of an enum is one this engine knows."""
        if value not in enum.values():
            self.add(field, f"{value} is no value of this enum")

    def done(self) -> None:
        """Raise FieldError if there was anything."""
        if self._fields:
            raise FieldError(self._fields)


def run_request(request: RunRequest) -> RunRequest:
    """Return the request as the engine takes it, a copy without what only the engine gives.

    Raises:
        FieldError: with all violations.
    """
    faults = _Faults()
    faults.text("agent", request.agent, MAX_NAME)
    faults.text("conversation_id", request.conversation_id, MAX_ID)
    faults.text("request_id", request.request_id, MAX_REQUEST_ID)
    faults.text("claw", request.claw, MAX_CLAW)
    faults.enum("on_busy", request.on_busy, BusyPolicy)
    _message(request, faults)
    _options(request.options, faults)
    _metadata(request.metadata, faults)
    faults.done()
    accepted = RunRequest()
    accepted.CopyFrom(request)
    for given in ("id", "author", "create_time"):
        accepted.message.ClearField(given)
    return accepted


def _message(request: RunRequest, faults: _Faults) -> None:
    message = request.message
    if not request.HasField("message"):
        faults.add("message", "is missing")
        return
    if message.role != Role.ROLE_USER:
        faults.add("message.role", "must be ROLE_USER")
    if not message.parts:
        faults.add("message.parts", "needs at least one part of text, image or file")
    elif len(message.parts) > MAX_PARTS:
        faults.add("message.parts", f"has more than {MAX_PARTS} parts")
    for number, part in enumerate(message.parts[:MAX_PARTS]):
        _part(f"message.parts[{number}]", part, faults)
    if message.parts and not any(_says_something(part) for part in message.parts[:MAX_PARTS]):
        faults.add("message.parts", "has nothing but blank text")
    if sum(len(part.text.encode()) for part in message.parts[:MAX_PARTS]) > MAX_TEXT:
        faults.add("message.parts", f"has more than {MAX_TEXT} bytes of text")
    if sum(len(part.image.data) + len(part.file.data) for part in message.parts[:MAX_PARTS]) > MAX_MEDIA:
        faults.add("message.parts", f"has more than {MAX_MEDIA} bytes of images and files")


def _says_something(part: ContentPart) -> bool:
    return part.WhichOneof("part") != "text" or not part.text or bool(part.text.strip())


def _part(path: str, part: ContentPart, faults: _Faults) -> None:
    match part.WhichOneof("part"):
        case "text":
            if not part.text:
                faults.add(f"{path}.text", "is empty")
        case "image":
            _media(f"{path}.image", part.image, faults)
        case "file":
            _media(f"{path}.file", part.file, faults)
        case "reasoning" | "tool_call" | "tool_result" as other:
            faults.add(f"{path}.{other}", "a user's message has only text, image and file")
        case None:
            faults.add(path, "is empty, or newer than this engine")


def _media(path: str, media: Media, faults: _Faults) -> None:
    faults.text(f"{path}.name", media.name, MAX_NAME)
    kind, slash, name = media.media_type.partition("/")
    if not (kind and slash and name) or len(media.media_type) > MAX_ID or not media.media_type.isprintable():
        faults.add(f"{path}.media_type", 'must be a media type such as "image/png"')
    match media.WhichOneof("source"):
        case "url":
            faults.text(f"{path}.url", media.url, MAX_URL)
            if not media.url.startswith(("https://", "http://")):
                faults.add(f"{path}.url", "must begin with https:// or http://")
        case "data":
            if not media.data:
                faults.add(f"{path}.data", "is empty")
        case None:
            faults.add(path, "needs url or data")


def _options(options: RunOptions, faults: _Faults) -> None:
    faults.text("options.model", options.model, MAX_NAME)
    if options.max_steps < 0:
        faults.add("options.max_steps", "must not be negative")
    faults.enum("options.retry_mode", options.retry_mode, RetryMode)
    faults.enum("options.on_disconnect", options.on_disconnect, DisconnectPolicy)
    if len(options.interceptors) > MAX_PAIRS:
        faults.add("options.interceptors", f"has more than {MAX_PAIRS} entries")
    for name in islice(options.interceptors, MAX_PAIRS):
        faults.text("options.interceptors", name, MAX_NAME, required=True)


def _metadata(metadata: Mapping[str, str], faults: _Faults) -> None:
    if len(metadata) > MAX_PAIRS:
        faults.add("metadata", f"has more than {MAX_PAIRS} pairs")
    for key, value in islice(metadata.items(), MAX_PAIRS):
        faults.text("metadata", key, MAX_NAME, required=True)
        if len(value.encode()) > MAX_VALUE:
            faults.add(f"metadata[{key}]", f"has more than {MAX_VALUE} bytes")


def attach_request(request: AttachRequest) -> None:
    """Raise FieldError unless the request is well-formed."""
    faults = _Faults()
    faults.text("run_id", request.run_id, MAX_ID, required=True)
    if request.after_seq < 0:
        faults.add("after_seq", "must not be negative")
    faults.done()


def resume_request(request: ResumeRequest) -> None:
    """Raise FieldError unless the request is well-formed."""
    faults = _Faults()
    faults.text("run_id", request.run_id, MAX_ID, required=True)
    faults.text("request_id", request.request_id, MAX_REQUEST_ID)
    if not request.decisions and not request.history_edits:
        faults.add("decisions", "needs at least one, or a history edit")
    for field in ("decisions", "history_edits"):
        if len(getattr(request, field)) > MAX_PARTS:
            faults.add(field, f"has more than {MAX_PARTS}")
    for number, decision in enumerate(request.decisions[:MAX_PARTS]):
        field = f"decisions[{number}]"
        faults.text(f"{field}.interrupt_id", decision.interrupt_id, MAX_INTERRUPT_ID, required=True)
        faults.enum(f"{field}.action", decision.action, DecisionAction)
        faults.enum(f"{field}.remember", decision.remember, RememberScope)
        if len(decision.comment.encode()) > MAX_REASON:
            faults.add(f"{field}.comment", f"has more than {MAX_REASON} bytes")
        for name in ("args_json", "response_json"):
            if len(getattr(decision, name).encode()) > MAX_ANSWER:
                faults.add(f"{field}.{name}", f"has more than {MAX_ANSWER} bytes")
    faults.done()


def cancel_request(request: CancelRequest) -> None:
    """Raise FieldError unless the request is well-formed."""
    faults = _Faults()
    faults.text("run_id", request.run_id, MAX_ID, required=True)
    if len(request.reason.encode()) > MAX_REASON:
        faults.add("reason", f"has more than {MAX_REASON} bytes")
    faults.done()


def retry_request(request: RetryRunRequest) -> None:
    """Raise FieldError unless the request is well-formed."""
    faults = _Faults()
    faults.text("run_id", request.run_id, MAX_ID, required=True)
    faults.text("request_id", request.request_id, MAX_REQUEST_ID)
    faults.done()


def switch_request(request: SetInterceptorEnabledRequest) -> None:
    """Raise FieldError unless the request is well-formed."""
    faults = _Faults()
    faults.text("agent", request.agent, MAX_NAME, required=True)
    faults.text("interceptor", request.interceptor, MAX_NAME, required=True)
    faults.done()


def list_runs_request(request: ListRunsRequest) -> int:
    """Return the size of the page; raise FieldError unless the request is well-formed."""

    def more(faults: _Faults) -> None:
        faults.text("conversation_id", request.conversation_id, MAX_ID)
        if len(request.states) > MAX_PARTS:
            faults.add("states", f"has more than {MAX_PARTS}")
        for number, state in enumerate(request.states[:MAX_PARTS]):
            if state == RunState.RUN_STATE_UNSPECIFIED or state not in RunState.values():
                faults.add(f"states[{number}]", f"{state} is no state of a run")

    return page(request.page_size, request.page_token, more)


def page(size: int, token: str, more: Callable[[_Faults], None] | None = None) -> int:
    """Return how many items a page has at most; raise FieldError for an unusable size or token."""
    faults = _Faults()
    if size < 0:
        faults.add("page_size", "must not be negative")
    faults.text("page_token", token, MAX_TOKEN)
    if more is not None:
        more(faults)
    faults.done()
    return min(size, MAX_PAGE) or DEFAULT_PAGE


def page_of(size: int, token: str, *, conversation_id: str) -> int:
    """Return the size of a page within a conversation, whose id must be there."""
    return page(size, token, lambda faults: faults.text("conversation_id", conversation_id, MAX_ID, required=True))


def required_id(field: str, value: str) -> None:
    """Raise FieldError unless an id or name is there and well-formed."""
    faults = _Faults()
    faults.text(field, value, MAX_NAME, required=True)
    faults.done()
