"""Images and files of messages, in the forms that OpenAI's two APIs take: by address, as a data address, as text.

Text files and what cannot be sent at all (a file by address, an empty one) become text: a model that is told of a
file it cannot see can say so.
"""

import base64

from dualclaw import Media

_MAGIC = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"), (b"RIFF", "image/webp"))


def media_type_of(media: Media, kind: str) -> str:
    """Return the media type, guessed from the bytes where it is not given; ``kind`` is "image" or "file"."""
    if media.media_type:
        return media.media_type
    found = next((name for magic, name in _MAGIC if media.data.startswith(magic)), None)
    return found or ("image/png" if kind == "image" else "application/octet-stream")


def media_note(media: Media, kind: str) -> str:
    """Return what stands in the place of media that are not sent."""
    return f"[{' '.join(filter(None, [kind, media.media_type, media.name]))}]"


def media_text(media: Media, kind: str) -> str | None:
    """Return the text that media become, or None if they are sent as they are."""
    media_type = media_type_of(media, kind)
    match media.WhichOneof("source"):
        case "url":
            return None if media_type.startswith("image/") else f"{media_note(media, kind)} {media.url}"
        case "data" if media_type.startswith("text/"):
            return f"{media_note(media, kind)}\n{media.data.decode('utf-8', 'replace')}"
        case "data":
            return None
    return media_note(media, kind)


def media_address(media: Media, kind: str) -> str:
    """Return the address of media: theirs, or one that holds the bytes."""
    if media.WhichOneof("source") == "url":
        return media.url
    return f"data:{media_type_of(media, kind)};base64,{base64.b64encode(media.data).decode('ascii')}"
