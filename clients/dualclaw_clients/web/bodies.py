"""Reading and understanding request bodies: protobuf JSON of the rpc's request, or the original route's object.

Native routes take both name styles of protobuf JSON (``request_id``, ``requestId``) and refuse what they do
not know by name, so a typing error never becomes a silently ignored option. Enum values may also be given as the
frames show them ("approve" for DECISION_ACTION_APPROVE), so that what ``allowed_actions`` lists can be sent back.
The original route ignores keys it does not know, because its front-ends were never told otherwise.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import TypeVar, cast
from urllib.parse import parse_qsl

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message as ProtoMessage
from starlette.types import Receive, Scope

from dualclaw import ContentPart, Message, Role, RunRequest
from dualclaw.errors import EngineError, FieldError
from dualclaw_clients.web.replies import HttpRefusal

BODY_TIMEOUT = 30.0
"""Seconds within which a body must have arrived."""

M = TypeVar("M", bound=ProtoMessage)


class ClientLeft(Exception):
    """The client went away before its body was complete; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the request's body.

    Raises:
        HttpRefusal: 413 above ``limit`` bytes, 408 when it takes longer than BODY_TIMEOUT.
        ClientLeft: the client left.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        text = f"the body did not arrive within {BODY_TIMEOUT:g} seconds"
        hint = "Send the body whole and at once; Content-Length must be its size."
        raise HttpRefusal(408, "INVALID_REQUEST", text, hint=hint) from None


def parse_object(body: bytes) -> dict[str, object]:
    """Return the JSON object of a body.

    Raises:
        FieldError: it is not one JSON object, repeats a key, or has a number JSON does not know.
    """
    try:
        value: object = _decode(body.decode(json.detect_encoding(body), "surrogatepass"))
        if b"\\ud" in body.lower():
            value = _whole(value)
    except RecursionError:
        raise FieldError({"body": "is nested too deeply"}) from None
    except ValueError as error:
        raise FieldError({"body": f"is not JSON: {_reason(error)}"}) from None
    if not isinstance(value, dict):
        raise FieldError({"body": "must be one JSON object"})
    return value


def parse_message(message: M, value: dict[str, object]) -> M:
    """Fill a request from protobuf JSON and return it.

    Raises:
        EngineError: INVALID_REQUEST; unknown fields are named, all of them.
    """
    wrong: dict[str, str] = {}
    whole = _understood(cast("Descriptor", message.DESCRIPTOR), value, "", wrong)
    if wrong:
        raise FieldError(wrong)
    try:
        return json_format.ParseDict(whole, message)
    except json_format.ParseError as error:
        raise EngineError("INVALID_REQUEST", str(error)) from None


def original_request(body: bytes) -> RunRequest:
    """Return the run an original front-end asks for: ``{"content", "conversation_id"?, "agent"?, "request_id"?}``.

    Raises:
        FieldError: what is wrong with which key.
    """
    value = parse_object(body)
    wrong: dict[str, str] = {}
    content = value.get("content")
    if not isinstance(content, str) or not content:
        wrong["content"] = "must be a non-empty string"
    conversation = value.get("conversation_id")
    if isinstance(conversation, int) and not isinstance(conversation, bool):
        conversation = str(conversation)
    agent, request_id = value.get("agent"), value.get("request_id")
    for name, text in {"conversation_id": conversation, "agent": agent, "request_id": request_id}.items():
        if text is not None and not isinstance(text, str):
            wrong[name] = "must be a string or an integer" if name == "conversation_id" else "must be a string"
    if wrong:
        raise FieldError(wrong)
    return RunRequest(
        message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=str(content))]),
        conversation_id=str(conversation or ""),
        agent=str(agent or ""),
        request_id=str(request_id or ""),
    )


def parse_query(scope: Scope, allowed: Mapping[str, bool]) -> dict[str, list[str]]:
    """Return the query's parameters; ``allowed`` maps each known name to whether it may be repeated.

    Both name styles are taken, as in bodies (``page_size``, ``pageSize``); what is returned has the known names.

    Raises:
        FieldError: a parameter is unknown, or repeated where it may not be.
    """
    if not scope["query_string"]:
        return {}
    styles = {_camel_case(name): name for name in allowed}
    found: dict[str, list[str]] = {}
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        found.setdefault(styles.get(name, name), []).append(value)
    wrong = {
        name: "may be given once" if name in allowed else f"is unknown; known are {', '.join(allowed) or 'none'}"
        for name, values in found.items()
        if name not in allowed or (len(values) > 1 and not allowed[name])
    }
    if wrong:
        raise FieldError(wrong)
    return found


def parse_count(text: str, field: str) -> int:
    """Return a non-negative 32-bit number.

    Raises:
        FieldError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
        raise FieldError({field: "must be a whole number from 0 to 2147483647"})
    return int(text)


def _understood(
    descriptor: Descriptor, value: dict[str, object], path: str, wrong: dict[str, str]
) -> dict[str, object]:
    """Return a message's JSON with enum values by their full names; what is not understood goes into ``wrong``."""
    found: dict[str, object] = {}
    for key, inner in value.items():
        found[key] = inner
        field = descriptor.fields_by_name.get(key) or descriptor.fields_by_camelcase_name.get(key)
        if field is None:
            wrong[path + str(key)] = f"is not a field of {descriptor.name}"
            continue
        kind, names = field.message_type, field.enum_type
        if kind is not None and (kind.GetOptions().map_entry or kind.full_name.startswith("google.protobuf.")):
            continue
        if kind is None and names is None:
            continue
        read: list[object] = []
        for index, item in enumerate(inner if isinstance(inner, list) else [inner]):
            place = f"{path}{key}[{index}]" if isinstance(inner, list) else f"{path}{key}"
            if names is not None:
                read.append(_enum_name(names, item, place, wrong))
            elif kind is not None and isinstance(item, dict):
                read.append(_understood(kind, item, f"{place}.", wrong))
            else:
                read.append(item)  # no message; the parser says so in its own words
        found[key] = read if isinstance(inner, list) else read[0]
    return found


def _enum_name(names: EnumDescriptor, value: object, path: str, wrong: dict[str, str]) -> object:
    """Return the full name of a value given by its full or short name; numbers and null are protobuf JSON's own."""
    if not isinstance(value, str):
        return value
    # buf's lint has every enum begin with ..._UNSPECIFIED, so what stands before it is the prefix of all.
    prefix = names.values[0].name.removesuffix("UNSPECIFIED")
    for full in (value, prefix + value.upper()):
        if full in names.values_by_name:
            return full
    known = ", ".join(name.name.removeprefix(prefix).lower() for name in names.values[1:])
    wrong[path] = f"{value[:80]!r} is not known; known are {known}"
    return value


def _too_large(limit: int) -> HttpRefusal:
    hint = "Send less, or raise DUALCLAW_WEB_MAX_BODY of the gateway."
    return HttpRefusal(413, "INVALID_REQUEST", f"the body is larger than {limit} bytes", hint=hint)


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite).decode


def _reason(error: ValueError) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)


def _whole(value: object) -> object:
    """Replace lone surrogates, which have no UTF-8 form, by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(inner) for key, inner in value.items()}
    return value
