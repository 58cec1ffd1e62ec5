"""Images and files as content blocks of the Anthropic API; what it does not take becomes a note of text."""

import base64
import re

from dualclaw import Media
from dualclaw.events import clean_text
from dualclaw_server.models.media import media_note

Wire = dict[str, object]

_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_SAME = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg"}
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)


def media_block(media: Media, kind: str) -> Wire:
    """Return the block for an image or file.

    The API compares an image with its declared type and refuses both a wrong one and types it does not know, so
    the bytes decide, not the declaration.
    """
    declared = media.media_type.partition(";")[0].strip().lower()
    declared = _SAME.get(declared, declared)
    match media.WhichOneof("source"):
        case "url":
            return _from_url(media, declared, kind)
        case "data":
            return _from_data(media, media.data, declared, kind)
    return _note(media, kind)


def _from_url(media: Media, declared: str, kind: str) -> Wire:
    url = media.url.strip()
    if found := _DATA_URL.match(url):
        try:
            data = base64.b64decode(url[found.end() :], validate=True)
        except ValueError:
            return _note(media, kind)
        return _from_data(media, data, declared or found[1].lower(), kind)
    if not url.lower().startswith(("http://", "https://")):
        return _note(media, kind)
    if declared in _IMAGES or (not declared and kind == "image"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    if declared == "application/pdf":
        return {"type": "document", "source": {"type": "url", "url": url}}
    return _note(media, kind, f" {url}")


def _from_data(media: Media, data: bytes, declared: str, kind: str) -> Wire:
    actual = _type_of(data)
    if actual in _IMAGES:
        return {"type": "image", "source": _encoded(actual, data)}
    if actual == "application/pdf":
        title = {"title": media.name} if media.name.strip() else {}
        return {"type": "document", "source": _encoded(actual, data), **title}
    if declared.startswith("text/") and data.strip():
        return _note(media, kind, f"\n{data.decode('utf-8', 'replace')}")
    return _note(media, kind)


def _type_of(data: bytes) -> str:
    if data.startswith(b"\x89PNG\r\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"GIF8"):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return "application/pdf" if data.startswith(b"%PDF-") else ""


def _encoded(media_type: str, data: bytes) -> Wire:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode("ascii")}


def _note(media: Media, kind: str, more: str = "") -> Wire:
    return {"type": "text", "text": clean_text(f"{media_note(media, kind)}{more}")}
