"""The HTTP protocol of the gateway: uvicorn's fast one, with bounds for the heads of requests."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dualclaw_clients.http_heads import HEAD_LIMIT, TimedHeads


class BoundedHeads(TimedHeads, HttpToolsProtocol):
    """Counts what arrives until a head is whole."""

    # In an instance's dict they would be too many for the one Python shares among objects of a class: 1.4 KB each.
    __slots__ = ("_head_size", "_reads_head", "_waits")
    _head_size: int
    _reads_head: bool
    _waits: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        self._reads_head, self._waits = False, None
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """Begin to count."""
        self._reads_head, self._head_size = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Count no longer."""
        self._reads_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that goes on beyond HEAD_LIMIT."""
        super().data_received(data)
        if self._reads_head and not self.transport.is_closing():
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self.send_400_response(f"The head of a request may have {HEAD_LIMIT} bytes.")
