"""What answers at an address where no gRPC comes about.

gRPC itself says no more than that it waits. So the port is greeted once, as HTTP/2 begins, and what it does then is
put into words: most people who meet this have forgotten TLS, a port or a start.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final

GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The preface of HTTP/2 and its first frame: empty SETTINGS."""
PATIENCE: Final = 2.0
"""Seconds each of connecting and answering may take."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found."""

    text: str
    lasting: bool = False
    """It is no use to wait: a server that is still starting would not answer like that."""
    tls_fails: bool = False


async def greet(host: str, port: int, context: ssl.SSLContext | None) -> Answer:
    """Connect, greet and say what came of it. ``context``: of TLS; None: plain text."""
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except TimeoutError:
        return Answer(f"no {'TLS handshake' if context else 'connection'} comes about in {PATIENCE:g} s")
    except OSError as error:
        return _not_connected(error)
    try:
        writer.write(GREETING)
        async with asyncio.timeout(PATIENCE):
            return _heard(await reader.read(64), tls=context is not None)
    except TimeoutError:
        return Answer("what listens there takes the connection and says nothing")
    except OSError as error:
        return _not_connected(error)
    finally:
        writer.transport.abort()


def _not_connected(error: OSError) -> Answer:
    match error:
        case ssl.SSLCertVerificationError():
            told = f"its certificate is not trusted: {error.verify_message} (--ca-file FILE, and the name it is for)"
            return Answer(told, lasting=True, tls_fails=True)
        case ssl.SSLError():
            reason = (error.reason or str(error)).lower().replace("_", " ")
            told = f"TLS fails: {reason} (is it plain text? does it want --cert-file and --key-file?)"
            return Answer(told, lasting=True, tls_fails=True)
        case ConnectionRefusedError():
            return Answer("nothing listens there")
        case ConnectionResetError() | BrokenPipeError():
            return Answer("what listens there breaks the connection off (is it TLS? then --tls or --ca-file FILE)")
        case _:
            # A name that is not known has no errno of the system; the others may pass.
            return Answer(error.strerror or str(error), lasting=(error.errno or 0) < 0)


def _heard(data: bytes, *, tls: bool) -> Answer:
    if not data:
        hint = "" if tls else " (is it TLS? then --tls or --ca-file FILE)"
        return Answer(f"what listens there closes the connection{hint}")
    if data[:2] == b"\x15\x03":
        return Answer("it speaks TLS: add --tls, or --ca-file FILE", lasting=True)
    if data.startswith(b"HTTP/"):
        hint = "" if tls else "; a TLS port answers like that too: --tls or --ca-file FILE"
        return Answer(f"it speaks HTTP/1.1 and no gRPC{hint}", lasting=True)
    if data[3:4] == b"\x04":
        return Answer("it speaks HTTP/2, and still no gRPC connection comes about")
    return Answer(f"it answers {data[:20]!r}, which is no HTTP/2", lasting=True)
