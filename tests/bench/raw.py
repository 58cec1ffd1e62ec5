"""The limit of the wire: a bare ``grpc.aio`` server under uvloop that writes bytes it made before it was asked.

One method, ``/bench.Raw/Stream``: the request is ``MESSAGES PACE`` as text, the response so many messages, one every
``PACE`` milliseconds (0: all at once). A message is what the engine would send for one token: a ``RunResponse`` with
one event and every field of its envelope.

Run as ``python -m tests.bench.raw``; it prints its address.
"""

import asyncio
import sys
from typing import Any

import grpc
import uvloop

from dualclaw import RunResponse
from dualclaw.events import make_delta
from tests.bench.provider import TOKENS

METHOD = "/bench.Raw/Stream"


def message(token: str) -> bytes:
    """Return the message of one token."""
    event = make_delta(token)
    event.seq, event.trace_id, event.tenant_id = 1, "0af7651916cd43dd8448eb211c80319c", "default"
    event.claw, event.run_id = "bench", "01a22f0e-8f6d-7415-9bd9-a5d60fd49fe7"
    return RunResponse(events=[event]).SerializeToString()


MESSAGES = tuple(message(token) for token in TOKENS)


async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """Write the messages, each as if there were no other."""
    count, pace = (int(part) for part in request.split())
    clock = asyncio.get_running_loop()
    due = clock.time()
    for number in range(count):
        if pace and (wait := due - clock.time()) > 0:
            await asyncio.sleep(wait)
        await context.write(MESSAGES[number % len(MESSAGES)])
        due += pace / 1000


async def main() -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Raw", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"raw server listening on 127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
