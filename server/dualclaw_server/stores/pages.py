"""Page tokens: the key of the last item, so that a page neither repeats nor skips when items are added.

A token is opaque to clients: base64 of a JSON list of integers. It carries no secret and gives no access;
the tenant comes from the call each time.
"""

from __future__ import annotations

import base64
import binascii
import json

from dualclaw.errors import FieldError

DEFAULT_SIZE = 50
MAX_SIZE = 500
_LARGEST = 2**63 - 1


def page_length(asked: int) -> int:
    """Return how many items a page gets: 0 or less means 50, above 500 means 500."""
    return min(asked, MAX_SIZE) if asked > 0 else DEFAULT_SIZE


def make_token(*key: int) -> str:
    """Return the token of a page that begins after the item with this key."""
    return base64.urlsafe_b64encode(json.dumps(key, separators=(",", ":")).encode()).decode().rstrip("=")


def page_key(token: str, length: int) -> tuple[int, ...] | None:
    """Return the key in a token; None for the empty one, which is the first page.

    Raises:
        FieldError: it is not a token of such a list.
    """
    if not token:
        return None
    try:
        key = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        key = None
    if not isinstance(key, list) or len(key) != length or not all(_is_key_part(part) for part in key):
        raise FieldError({"page_token": "is not the next_page_token of an earlier answer to this list"})
    return tuple(key)


def _is_key_part(part: object) -> bool:
    return isinstance(part, int) and not isinstance(part, bool) and abs(part) <= _LARGEST
