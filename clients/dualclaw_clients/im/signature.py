"""Signatures of webhook messages: HMAC-SHA256 over ``TIMESTAMP.BODY``, the same in both directions.

- The signature covers the raw bytes of the body, before anything has parsed them, and the timestamp.
- Every secret and every signature is compared, each in constant time, so the time taken tells nothing.
- A timestamp outside the window is refused, before and behind: a recorded message does not work for ever. Inside the
  window the message's id, which the signature covers, is known from the first time.

BadSignature
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Final

TIMESTAMP_HEADER: Final = "dualclaw-timestamp"
SIGNATURE_HEADER: Final = "dualclaw-signature"
SCHEME: Final = "v1"
MAX_SIGNATURES: Final = 8
"""Of a message; a sender that changes its secret signs with both."""
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


class BadSignature(Exception):
    """A message was not signed by who should have; the text says what is wrong and helps nobody to sign."""


def sign(secret: str, timestamp: int | str, body: bytes) -> str:
    """Return a signature as its header has it: ``v1=HEX``."""
    signed = f"{timestamp}.".encode() + body
    return f"{SCHEME}={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


def check(secrets: Sequence[str], timestamp: str, signatures: str, body: bytes, *, now: float, window: float) -> None:
    """Check that a message was signed with one of the secrets, and lately.

    Args:
        secrets: those that count.
        timestamp: the header's text: seconds since 1970.
        signatures: the header's text: ``v1=HEX``, or several with commas between them.
        body: the raw bytes.
        now: seconds since 1970.
        window: seconds the timestamp may be off.

    Raises:
        BadSignature: it was not.
    """
    if _TIMESTAMP.fullmatch(timestamp) is None:
        raise BadSignature(f"{TIMESTAMP_HEADER} must be the seconds since 1970, in decimal digits")
    given = [part.strip().encode() for part in signatures.split(",")]
    if not signatures.strip() or len(given) > MAX_SIGNATURES:
        raise BadSignature(f"{SIGNATURE_HEADER} must have 1 to {MAX_SIGNATURES} signatures, each {SCHEME}=HEX")
    fits = False
    for secret in secrets:
        expected = sign(secret, timestamp, body).encode()
        for one in given:
            fits |= hmac.compare_digest(expected, one)
    if not fits:
        raise BadSignature(f"{SIGNATURE_HEADER} fits no secret; sign the bytes TIMESTAMP.BODY by HMAC-SHA256")
    if abs(now - int(timestamp)) > window:
        raise BadSignature(f"{TIMESTAMP_HEADER} is more than {window:g} seconds off")
