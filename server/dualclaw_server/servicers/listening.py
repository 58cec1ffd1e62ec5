"""Having an address to listen on: whether it is free, with which credentials, under which limits of the transport."""

import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc

_TELLING: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
"""Why an address cannot be had; in other trouble, as without IPv6, gRPC may know a way."""


class StartError(Exception):
    """The server cannot start, though its settings are right; the text says why in one line."""


async def check_free(listen: str, host: str, port: int) -> None:
    """Try to have the address before gRPC does, which tells no reason but writes a line of its own to stderr.

    A name may stand for several addresses; as with gRPC, one that can be had is enough.

    Raises:
        StartError: with the reason of the operating system.
    """
    if host.startswith("unix:"):
        return
    failure: OSError | None = None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC binds it
                    trial.bind(address)
                return
            except OSError as error:
                if error.errno not in _TELLING:
                    return
                failure = error if failure is None or error.errno == errno.EADDRINUSE else failure
    except OSError as error:
        failure = error
    if failure is not None:
        raise StartError(f"cannot listen on {listen}: {failure.strerror or failure}") from None


def options_of(
    max_receive_bytes: int, max_send_bytes: int, min_ping_interval: float, *, shared: bool
) -> Sequence[tuple[str, int]]:
    """Return the options of a gRPC server. ``shared``: the port belongs to other workers, too."""
    return (
        ("grpc.so_reuseport", int(shared)),  # a server nobody knows of must fail, not share the calls
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(min_ping_interval * 1000)),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
    )


def credentials_of(cert: Path | None, key: Path | None, client_ca: Path | None) -> grpc.ServerCredentials | None:
    """Return what a server shows its clients, from PEM files; None: no TLS. Raises StartError."""
    if cert is None or key is None:
        return None
    try:
        pair = (key.read_bytes(), cert.read_bytes())
        roots = client_ca.read_bytes() if client_ca is not None else None
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)
