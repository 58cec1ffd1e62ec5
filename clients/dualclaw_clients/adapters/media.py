"""Answers that are one image or one video, as media tools of older agents write them: as an HTML tag."""

from contextlib import suppress
from html.parser import HTMLParser
from typing import Literal, TypedDict


class MediaContent(TypedDict):
    """What ``BufferAdapter.assemble`` gives instead of text; the channel sends the thing itself."""

    __media__: Literal[True]
    media_type: Literal["image", "video"]
    url: str


def media_content(body: str) -> MediaContent | None:
    """Return the media a body begins with; None when it begins otherwise, or the tag is unfinished or has no URL."""
    body = body.lstrip()
    start = body[:6].lower()
    media_type: Literal["image", "video"]
    if start.startswith("<img"):
        media_type = "image"
    elif start == "<video":
        media_type = "video"
    else:
        return None
    finder = _SourceFinder()
    with suppress(_TagEndError):
        # Not closed afterwards: at the end of input the parser would go through unfinished markup again and again.
        finder.feed(body)
    return {"__media__": True, "media_type": media_type, "url": finder.url} if finder.url else None


class _TagEndError(Exception):
    """Everything that can name the URL has been read; the rest of the body need not be parsed."""


class _SourceFinder(HTMLParser):
    """Finds the URL of the first tag: its ``src``, or for a video that of the first ``<source>`` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.url = ""
        self._in_video = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the URL; go on only inside a video that has not named one."""
        first = not self._in_video
        if tag == "source" or (first and tag in ("img", "video")):
            # The first of several src counts, as in a browser.
            self.url = next((value or "" for name, value in attrs if name == "src"), "").strip()
        self._in_video = not self.url and (tag == "video" if first else True)
        if not self._in_video:
            raise _TagEndError

    def handle_endtag(self, tag: str) -> None:
        """Stop where the video ends."""
        if tag == "video":
            raise _TagEndError
