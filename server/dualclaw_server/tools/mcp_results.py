"""What an MCP tool answered, as parts of this engine: text, images and files, structured data as JSON text.

A server may say the same twice, as text and as ``structuredContent``; it is told to the model once.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from dualclaw import ContentPart, Media
from dualclaw.events import canonical_json, clean_text
from dualclaw_server.engine.tool import ToolOutput, ToolRaised
from dualclaw_server.tools.mcp_spec import Spec

MAX_BLOCKS = 100
"""Blocks of one result; a note says how many more there were."""


def output_of(spec: Spec, result: CallToolResult) -> ToolOutput:
    """Return a result's parts. Raises ToolRaised, with the server's words, for one that is an error."""
    parts = [_part(block) for block in result.content[:MAX_BLOCKS]]
    if len(result.content) > MAX_BLOCKS:
        parts.append(ContentPart(text=f"[{len(result.content) - MAX_BLOCKS} more blocks left out]"))
    if result.structured_content is not None and not _says(parts, result.structured_content):
        parts.append(ContentPart(text=canonical_json(result.structured_content)))
    if result.is_error:
        texts = [part.text for part in parts if part.text]
        raise ToolRaised(spec.clean("\n".join(texts)) or "the server reports an error and says nothing of it")
    return ToolOutput([part for part in parts if part.WhichOneof("part") != "text" or part.text])


def _part(block: object) -> ContentPart:
    match block:
        case TextContent():
            return ContentPart(text=clean_text(block.text))
        case ImageContent():
            return _media(block.data, block.mime_type, "")
        case AudioContent():
            return _media(block.data, block.mime_type, "")
        case ResourceLink():
            # Its address is the server's own and may mean nothing to anybody else; what can be opened is a file.
            if urlsplit(block.uri).scheme in ("http", "https"):
                name = clean_text(block.title or block.name)
                return ContentPart(file=Media(media_type=block.mime_type or "", url=clean_text(block.uri), name=name))
            return ContentPart(text=clean_text(f"[{block.title or block.name}: {block.uri}]"))
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return _media(resource.blob, resource.mime_type or "", resource.uri)
        case EmbeddedResource():
            return ContentPart(text=clean_text(f"[{block.resource.uri}]\n{getattr(block.resource, 'text', '')}"))
        case _:
            return ContentPart(text=f"[a block of type {type(block).__name__}]")


def _media(data: str, media_type: str, name: str) -> ContentPart:
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return ContentPart(text=f"[{clean_text(media_type)[:100] or 'media'} that is not base64]")
    media = Media(media_type=clean_text(media_type), data=content, name=clean_text(name))
    return ContentPart(image=media) if media_type.startswith("image/") else ContentPart(file=media)


def _says(parts: Sequence[ContentPart], value: object) -> bool:
    """Tell whether some text is this value's JSON already, or, as one result, the value itself."""
    wanted = canonical_json(value)
    alone = value["result"] if isinstance(value, dict) and value.keys() == {"result"} else None
    for part in parts:
        if not part.text:
            continue
        try:
            told = json.loads(part.text)
        except (ValueError, RecursionError):
            told = None
        if told is not None and canonical_json(told) == wanted:
            return True
        if alone is not None and (part.text == alone or (told is not None and told == alone)):
            return True
    return False
