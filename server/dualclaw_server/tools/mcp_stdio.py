"""MCP over the pipes of a subprocess, with bounds.

The SDK has a transport of its own for this; it joins a line of any length in memory, so that one answer of a
gigabyte takes the engine down with every run in it. Here:

- A message has at most ``max_message`` bytes. A longer answer is read past and becomes an error of its request.
- What is no JSON-RPC message is passed over: servers print all sorts of things.
- stderr goes to the log at DEBUG, in whole lines so that secrets are found; its end explains why a server died.
- The end follows the specification: close stdin, wait, SIGTERM to the process group, wait, SIGKILL. Nothing waits
  for long, whatever the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from dualclaw_server.tools.mcp_spec import Spec

log = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds a server has to end by itself, and again after SIGTERM."""
_CHUNK = 64 * 1024
_MAX_TAIL = 2_000
"""Bytes of stderr that are kept."""
_ANSWER_ID = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,15})\s*[,}]')
"""Head of an answer; a request has its method before its parameters, and ids of ours are numbers."""

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


class Process:
    """A server's process and what it said last."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.ended = asyncio.Event()
        """Set once its pipes are closed: nothing more will come."""
        self._tail = b""

    @asynccontextmanager
    async def transport(self) -> AsyncGenerator[tuple[Incoming, Outgoing]]:
        """Run the process while the context lasts. Raises OSError when it cannot be started."""
        spec = self._spec
        process = await asyncio.create_subprocess_exec(
            spec.command,
            *spec.args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | dict(spec.env),
            cwd=spec.cwd or None,
            start_new_session=True,
        )
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        if stdin is None or stdout is None or stderr is None:  # pipes were asked for
            raise OSError("the process has no pipes")
        to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self._read(stdout, to_session), name=f"mcp {spec.name} stdout"),
            asyncio.create_task(self._write(stdin, from_session, to_session), name=f"mcp {spec.name} stdin"),
            asyncio.create_task(self._listen(stderr), name=f"mcp {spec.name} stderr"),
        ]
        try:
            yield incoming, outgoing
        finally:
            incoming.close()
            outgoing.close()
            try:
                await _end(process, stdin)
            finally:
                for task in tasks:
                    task.cancel()
                self.ended.set()
            await asyncio.wait(tasks, timeout=GRACE)
            for stream in (to_session, from_session):
                stream.close()

    def last_words(self) -> str:
        """Return the end of what it wrote to stderr."""
        return self._tail.decode("utf-8", "replace").strip().rpartition("\n")[2]

    async def _read(
        self, stdout: asyncio.StreamReader, to_session: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        lines = _Lines(self._spec.max_message)
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            while chunk := await stdout.read(_CHUNK):
                for line in lines.feed(chunk):
                    message = self._message(line)
                    if message is not None:
                        await to_session.send(message)
        self.ended.set()
        to_session.close()

    def _message(self, line: bytes | _TooLong) -> SessionMessage | None:
        if isinstance(line, _TooLong):
            log.warning("MCP server %s sent a message of more than %d bytes", self._spec.name, self._spec.max_message)
            answer = _ANSWER_ID.match(line.head)
            if answer is None:
                return None
            text = f"the answer is larger than {self._spec.max_message} bytes"
            return SessionMessage(
                JSONRPCError(jsonrpc="2.0", id=int(answer[1]), error=ErrorData(code=INTERNAL_ERROR, message=text))
            )
        if not line.strip():
            return None
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            log.debug("MCP server %s wrote a line that is no message", self._spec.name)
            return None

    async def _write(
        self,
        stdin: asyncio.StreamWriter,
        from_session: MemoryObjectReceiveStream[SessionMessage],
        to_session: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        try:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(text.encode("utf-8", "replace") + b"\n")
                await stdin.drain()
        except (OSError, anyio.ClosedResourceError):
            to_session.close()  # whoever waits for an answer learns that none will come

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while chunk := await stderr.read(_CHUNK):
                self._tail = (self._tail + chunk)[-_MAX_TAIL:]
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if not newline and len(rest) > _CHUNK:
                    whole, rest = rest, b""
                if whole and log.isEnabledFor(logging.DEBUG):
                    told = self._spec.clean(whole.decode("utf-8", "replace"))
                    log.debug("MCP server %s: %s", self._spec.name, told)


class _TooLong:
    """A line that was read past; only its head is known."""

    def __init__(self, head: bytes) -> None:
        self.head = head


class _Lines:
    """Cuts a stream of bytes into lines of bounded length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._head: bytes | None = None
        """Of the line that is being read past."""

    def feed(self, chunk: bytes) -> list[bytes | _TooLong]:
        """Return the lines that a chunk completes."""
        found: list[bytes | _TooLong] = []
        *complete, rest = chunk.split(b"\n")
        for piece in complete:
            self._add(piece)
            found.append(_TooLong(self._head) if self._head is not None else b"".join(self._parts))
            self._parts, self._size, self._head = [], 0, None
        self._add(rest)
        return found

    def _add(self, piece: bytes) -> None:
        if self._head is not None:
            return
        self._parts.append(piece)
        self._size += len(piece)
        if self._size > self._limit:
            self._head = b"".join(self._parts)[:256]
            self._parts = []


async def _end(process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter) -> None:
    """Stop a process and, should it not obey, everything in its group."""
    with contextlib.suppress(OSError):
        stdin.close()
    try:
        for sent in (None, signal.SIGTERM, signal.SIGKILL):
            if sent is not None:
                _signal_group(process, sent)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE)
                return
        log.warning("an MCP server's process %d survives SIGKILL", process.pid)
    finally:
        if process.returncode is None:  # also when this very wait is cancelled
            _signal_group(process, signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
