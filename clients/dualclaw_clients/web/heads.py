"""The HTTP protocol of the gateway: uvicorn's fast one, with bounds for the heads of requests."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dualclaw_clients.http_heads import HEAD_LIMIT, TimedHeads


class BoundedHeads(TimedHeads, HttpToolsProtocol):
    """Counts what arrives until a head is whole."""

    _reads_head = False
    _head_size = 0

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
