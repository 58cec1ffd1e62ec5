"""A gRPC proxy in front of a good engine that lies in exactly one way; its hooks say which."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from dualclaw import CancelRequest, EngineEvent, GetRunRequest, GetRunResponse, Run, RunRequest, RunResponse
from dualclaw.rpc import ENGINE_SERVICE
from dualclaw_clients.conformance.rpcs import RPCS
from dualclaw_clients.conformance.seen import Exchange

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@dataclass
class Refusal:
    """How a call is refused."""

    code: grpc.StatusCode
    text: str
    trailing: tuple[tuple[str, str | bytes], ...] = ()


@dataclass
class Call:
    """One call on its way, for hooks to read and to keep their state in."""

    rpc: str
    request: ProtoMessage
    metadata: tuple[tuple[str, str], ...]
    scenario: str = ""
    """Text of the run's question without "conformance: "; "" while it is not known."""
    run_id: str = ""
    shift: int = 0
    count: int = 0
    after_crash: bool = False
    said: list[EngineEvent] = field(default_factory=list)
    """Events the engine has sent in this call, as they were."""


class Refused(Exception):
    """Raised by a hook that refuses a call."""

    def __init__(self, code: grpc.StatusCode, text: str, trailing: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        super().__init__(text)
        self.refusal = Refusal(code, text, trailing)


class Honest:
    """Hooks that change nothing."""

    proxy: "EngineProxy"

    def touches(self, call: Call, exchange: Exchange) -> bool:
        """Say whether anything may be changed about a call that an honest engine answered like this."""
        return True

    async def request(self, call: Call) -> None:
        """Change ``call.request`` or ``call.metadata``, or raise Refused."""

    def event(self, call: Call, event: EngineEvent) -> Sequence[EngineEvent]:
        """Return what is sent in place of an event."""
        return [event]

    def message(self, call: Call, events: Sequence[EngineEvent]) -> Sequence[bytes]:
        """Return the messages that carry some events."""
        return [RunResponse(events=events).SerializeToString()] if events else []

    def end(self, call: Call) -> None:
        """Raise Refused to end a stream that the engine ended with OK in another way."""

    async def left(self, call: Call) -> None:
        """The client hung up."""

    async def answer(self, call: Call) -> ProtoMessage | None:
        """Return the answer of a unary call that never reaches the engine; None: it does."""
        return None

    def response(self, call: Call, response: ProtoMessage) -> ProtoMessage:
        """Return what is answered in place of a response, or raise Refused."""
        return response

    def refusal(self, call: Call, refusal: Refusal) -> Refusal:
        """Return how the call is refused instead."""
        return refusal


class EngineProxy(grpc.GenericRpcHandler):
    """The proxy; use it as an async context manager.

    ``crash`` is what ``--restart`` would do, but for the engine, which stays as it is: streams break.
    """

    def __init__(self, engine: str, hooks: Honest, credentials: grpc.ServerCredentials | None = None) -> None:
        self.target = ""
        self._credentials = credentials
        self.scenarios: dict[str, str] = {}
        self._engine = engine
        self._hooks = hooks
        hooks.proxy = self
        self._crashed = asyncio.Event()

    async def __aenter__(self) -> "EngineProxy":
        self.channel = grpc.aio.insecure_channel(
            self._engine, [*UNLIMITED, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        )
        self._server = grpc.aio.server(options=[*UNLIMITED, ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        if self._credentials is None:
            self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        else:
            self.target = f"localhost:{self._server.add_secure_port('localhost:0', self._credentials)}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=None)
        await self.channel.close()

    async def crash(self) -> None:
        """Break every stream, as a server does that is killed."""
        self._crashed.set()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        _, service, rpc = details.method.split("/")
        if rpc not in RPCS:
            return None
        if RPCS[rpc].streams:
            return grpc.unary_stream_rpc_method_handler(partial(self._stream, service, rpc))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, service, rpc))

    async def upstream(self, request: ProtoMessage, metadata: tuple[tuple[str, str], ...]) -> list[EngineEvent]:
        """Make a streaming call of the proxy's own and return its events."""
        rpc = type(request).__name__.removesuffix("Request")
        call = self._streaming(ENGINE_SERVICE, rpc)(request.SerializeToString(), metadata=metadata)
        return [event async for data in call for event in RunResponse.FromString(data).events]

    async def look(self, run_id: str, metadata: tuple[tuple[str, str], ...]) -> Run:
        """Ask the engine for a run."""
        method = self.channel.unary_unary(f"/{ENGINE_SERVICE}/GetRun")
        answer = await method(GetRunRequest(run_id=run_id).SerializeToString(), metadata=metadata)
        return GetRunResponse.FromString(answer).run

    async def cancel(self, run_id: str, metadata: tuple[tuple[str, str], ...]) -> None:
        """Cancel a run."""
        method = self.channel.unary_unary(f"/{ENGINE_SERVICE}/Cancel")
        await method(CancelRequest(run_id=run_id).SerializeToString(), metadata=metadata)

    def _streaming(self, service: str, rpc: str) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
        return self.channel.unary_stream(f"/{service}/{rpc}")

    def _call(self, rpc: str, request: ProtoMessage, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Call:
        metadata = tuple((k, v) for k, v in context.invocation_metadata() or () if k == "authorization")
        run_id = getattr(request, "run_id", "")
        scenario = self.scenarios.get(run_id, "")
        if isinstance(request, RunRequest):
            scenario = "".join(part.text for part in request.message.parts).removeprefix("conformance: ")
        return Call(rpc, request, metadata, scenario, run_id, after_crash=self._crashed.is_set())

    async def _stream(
        self, service: str, rpc: str, data: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> AsyncIterator[bytes]:
        hooks, call = self._hooks, self._call(rpc, RPCS[rpc].request.FromString(data), context)
        refusal: Refusal | None = None
        stream: grpc.aio.UnaryStreamCall[bytes, bytes] | None = None
        crash = asyncio.create_task(self._crashed.wait()) if not self._crashed.is_set() else None
        try:
            await hooks.request(call)
            stream = self._streaming(service, rpc)(call.request.SerializeToString(), metadata=call.metadata)
            while True:
                read = asyncio.ensure_future(stream.read())
                await asyncio.wait([read, *([crash] if crash else [])], return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    read.cancel()
                    await asyncio.gather(read, return_exceptions=True)
                    raise Refused(grpc.StatusCode.UNAVAILABLE, "the server was killed")
                message = read.result()
                if message is grpc.aio.EOF:
                    break
                out: list[EngineEvent] = []
                for event in RunResponse.FromString(message).events:
                    if rpc == "Run" and event.run_id not in self.scenarios:
                        self.scenarios[event.run_id] = call.scenario
                    call.run_id = event.run_id
                    call.scenario = self.scenarios.get(event.run_id, call.scenario)
                    call.said.append(event)
                    out += hooks.event(call, EngineEvent.FromString(event.SerializeToString()))
                for part in hooks.message(call, out):
                    yield part
            hooks.end(call)
        except grpc.aio.AioRpcError as error:
            refusal = hooks.refusal(call, _refusal_of(error))
        except Refused as error:
            refusal = error.refusal
        except (asyncio.CancelledError, GeneratorExit):
            await asyncio.shield(hooks.left(call))
            raise
        finally:
            if crash is not None:
                crash.cancel()
            if stream is not None:
                stream.cancel()
        if refusal is not None:
            await context.abort(refusal.code, refusal.text, refusal.trailing)

    async def _unary(
        self, service: str, rpc: str, data: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> bytes:
        hooks, request, response = self._hooks, RPCS[rpc].request, RPCS[rpc].response
        parsed = request()
        with contextlib.suppress(DecodeError):  # bytes that are no message go on as they are
            parsed = request.FromString(data)
            data = b""
        call = self._call(rpc, parsed, context)
        try:
            await hooks.request(call)
            own = await hooks.answer(call)
            if own is not None:
                return own.SerializeToString()
            method = self.channel.unary_unary(f"/{service}/{rpc}")
            answer = await method(data or call.request.SerializeToString(), metadata=call.metadata)
            return hooks.response(call, response.FromString(answer)).SerializeToString()
        except grpc.aio.AioRpcError as error:
            refusal = hooks.refusal(call, _refusal_of(error))
        except Refused as error:
            refusal = error.refusal
        return await context.abort(refusal.code, refusal.text, refusal.trailing)


def _refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    return Refusal(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
