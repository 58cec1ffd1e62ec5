"""Opens the sockets a gateway listens on, before the HTTP server starts, so that a refusal is told in our words."""

import asyncio
import errno
import socket


class ListenError(Exception):
    """An address cannot be listened on."""


async def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Listen on every address a host name stands for; port 0 takes a free one.

    Raises:
        ListenError: it is in use, or not an address of this machine.
    """
    found: list[socket.socket] = []
    try:
        known = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        absent: OSError | None = None
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in known):
            try:
                found.append(socket.create_server(address, family=family))
            except OSError as error:
                if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                    raise
                absent = error  # "localhost" has an IPv6 address also where there is no IPv6
        if absent is not None and not found:
            raise absent
    except (OSError, UnicodeError) as error:
        for opened in found:
            opened.close()
        raise ListenError(_problem(error)) from None
    return found


def _problem(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError | socket.gaierror):
        return "the host is not known"
    match error.errno:
        case errno.EADDRINUSE:
            return "it is in use"
        case errno.EADDRNOTAVAIL:
            return "it is not an address of this machine"
        case errno.EACCES:
            return "this user may not listen on that port"
    return error.strerror or str(error)
