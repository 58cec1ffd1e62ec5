"""The connection to an MCP server: opened on first use, shared by all runs, opened again when it is lost.

Rules

- A connection lives in a task of its own, since what it is made of must be closed by whoever opened it; runs come and
  go around it. It ends with its event loop at the latest.
- Whoever wants it while it is being opened waits for the same attempt. An attempt has ``connect_timeout`` seconds, the
  handshake included. After a failure nobody tries again before a delay has passed, which doubles up to a minute; a
  use before that fails at once, or waits if that is short. A connection that held for a while forgives what was before.
- The list of tools is read when it is first wanted, and again after the server says that it changed, or once it is
  older than the server says it may be. Pages, tools and time for it are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
from collections.abc import Awaitable, Callable

from mcp import Client, MCPError
from mcp.client.session import ClientRequestContext
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp_types import (
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    Implementation,
    PaginatedRequestParams,
    ToolListChangedNotification,
)
from mcp_types import Tool as ListedTool
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from dualclaw_server.engine.hooks import stopped
from dualclaw_server.tools.mcp_http import Endpoint
from dualclaw_server.tools.mcp_spec import Spec, Unreachable, reason_of
from dualclaw_server.tools.mcp_stdio import GRACE, Process

log = logging.getLogger(__name__)

MAX_PAGES = 100
MAX_TOOLS = 500
FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
SHORT = 1.0
"""Seconds of delay that are waited for rather than told."""
HELD = 30.0
"""Seconds after which a connection has held."""
_LISTEN_AGAIN = 5.0
"""Seconds before a broken subscription to changes is made again."""

Elicited = Callable[[ElicitRequestParams], Awaitable[ElicitResult | ErrorData]]


class Life:
    """One connection, from the attempt to make it to its end."""

    def __init__(self, spec: Spec, elicited: Elicited) -> None:
        self._spec = spec
        self._elicited = elicited
        self.loop = asyncio.get_running_loop()
        self.client: asyncio.Future[Client] = self.loop.create_future()
        self.client.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._stop = asyncio.Event()
        self._end: Process | Endpoint = Process(spec) if spec.command else Endpoint(spec)
        self._tools: tuple[ListedTool, ...] | None = None
        self._fresh_until = 0.0
        self._changes = 0
        self._listing = asyncio.Lock()
        self._began = self.loop.time()
        # Nothing of the run that happened to open it may cling to it.
        self.task = asyncio.create_task(self._live(), name=f"mcp {spec.name}", context=contextvars.Context())

    @property
    def over(self) -> bool:
        """True once it is of no use any more."""
        if self.loop.is_closed() or self.task.done() or self._stop.is_set():
            return True
        return isinstance(self._end, Process) and self._end.ended.is_set()

    @property
    def held(self) -> bool:
        """True when it was up for a while."""
        opened = self.client.done() and not self.client.cancelled() and self.client.exception() is None
        return opened and self.loop.time() - self._began > HELD

    @property
    def by_handshake(self) -> bool:
        """True for the revisions in which the server asks in the middle of a call, instead of answering with what it
        wants to know.
        """
        client = self.client.result()
        return client.protocol_version not in MODERN_PROTOCOL_VERSIONS

    def retire(self) -> None:
        """End it; whoever needs the server makes a new one."""
        self._stop.set()

    async def aclose(self) -> None:
        """End it and wait until it has, for a bounded time."""
        self.retire()
        if not self.client.done():
            self.task.cancel()
        await asyncio.wait({self.task}, timeout=4 * GRACE)
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=GRACE)

    def why(self, error: BaseException) -> str:
        """Return what may be told of a failure."""
        told = f"no answer within {self._spec.connect_timeout:g} s" if isinstance(error, TimeoutError) else ""
        last = self._end.last_words()
        return self._spec.clean("; ".join(filter(None, (told or reason_of(error), last))))

    async def tools(self) -> tuple[ListedTool, ...]:
        """Return the tools the server has now. Raises MCPError, ValidationError, TimeoutError."""
        async with asyncio.timeout(self._spec.connect_timeout), self._listing:
            if self._tools is None or self.loop.time() >= self._fresh_until:
                self._tools = await self._list(self.client.result())
        return self._tools

    async def _list(self, client: Client) -> tuple[ListedTool, ...]:
        found: dict[str, ListedTool] = {}
        cursors: set[str] = set()
        cursor, before, fresh = None, self._changes, float("inf")
        for _ in range(MAX_PAGES):
            params = PaginatedRequestParams(cursor=cursor) if cursor is not None else None
            page = await client.session.list_tools(params=params)
            for tool in page.tools:
                found.setdefault(tool.name, tool)
            if page.ttl_ms is not None and not self.by_handshake:
                fresh = min(fresh, page.ttl_ms / 1000)
            cursor = page.next_cursor
            if not cursor or cursor in cursors or len(found) > MAX_TOOLS:
                break
            cursors.add(cursor)
        if cursor or len(found) > MAX_TOOLS:
            log.warning("MCP server %s lists more tools than are taken: %d", self._spec.name, MAX_TOOLS)
        self._fresh_until = self.loop.time() + fresh if before == self._changes else 0.0
        return tuple(found.values())[:MAX_TOOLS]

    def _changed(self) -> None:
        self._changes += 1
        self._fresh_until = 0.0

    async def _live(self) -> None:
        spec = self._spec
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = Client(
                    self._end.transport(),
                    mode=spec.protocol,
                    cache=None,
                    client_info=Implementation(name="dualclaw", version="1"),
                    elicitation_callback=self._on_elicitation,
                    message_handler=self._on_message,
                )
                async with asyncio.timeout(spec.connect_timeout):
                    await stack.enter_async_context(client)
                self._began = self.loop.time()
                self.client.set_result(client)
                log.info("MCP server %s is connected, protocol %s", spec.name, client.protocol_version)
                listening = asyncio.create_task(self._listen(client), name=f"mcp {spec.name} changes")
                try:
                    await self._until_over()
                finally:
                    listening.cancel()
                    await asyncio.wait({listening}, timeout=GRACE)
        except asyncio.CancelledError:
            self.client.cancel()
            raise
        except BaseException as error:
            if self.client.done():
                log.warning("MCP server %s is lost: %s", spec.name, self.why(error))
            else:
                self.client.set_exception(error if isinstance(error, Exception) else Unreachable(reason_of(error)))
            if not isinstance(error, Exception):
                raise
        finally:
            self._stop.set()

    async def _until_over(self) -> None:
        waits = {asyncio.create_task(self._stop.wait())}
        if isinstance(self._end, Process):
            waits.add(asyncio.create_task(self._end.ended.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _listen(self, client: Client) -> None:
        """Hear of changes of the list, where one has to ask for that."""
        tools = client.server_capabilities.tools
        if self.by_handshake or tools is None or not tools.list_changed:
            return
        while True:
            with contextlib.suppress(SubscriptionLost, TimeoutError):
                try:
                    async with client.listen(tools_list_changed=True) as changes:
                        self._changed()  # what happened before is not told
                        async for _ in changes:
                            self._changed()
                except (MCPError, ListenNotSupportedError) as error:
                    log.debug("MCP server %s tells no changes: %s", self._spec.name, self._spec.clean(str(error)))
                    return
            await asyncio.sleep(_LISTEN_AGAIN)

    async def _on_message(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._changed()

    async def _on_elicitation(
        self, context: ClientRequestContext, params: ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        return await self._elicited(params)


class Connection:
    """A server's connection at any time; at most one is alive."""

    def __init__(self, spec: Spec, elicited: Elicited) -> None:
        self._spec = spec
        self._elicited = elicited
        self._life: Life | None = None
        self._failures = 0
        self._next_try = 0.0
        self._why = ""
        self._closed = False

    async def life(self) -> Life:
        """Return the connection, made if there is none. Raises Unreachable."""
        loop = asyncio.get_running_loop()
        while self._life is None or self._life.over or self._life.loop is not loop:
            if self._closed:
                raise Unreachable("it was closed, because the engine shuts down")
            if self._life is None or self._life.held or self._life.loop is not loop:
                self._failures, self._next_try = 0, 0.0
            wait = self._next_try - loop.time()
            if wait > SHORT:
                raise Unreachable(f"it is down ({self._why or 'it ended'}) and is tried again in {wait:.1f} s")
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2**self._failures)
            self._next_try = loop.time() + delay * random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 20)
            self._life = Life(self._spec, self._elicited)
        life = self._life
        try:
            # Longer than an attempt may take: one that is out of time is still to be taken down.
            await asyncio.wait_for(asyncio.shield(life.client), self._spec.connect_timeout + 4 * GRACE)
        except (Exception, asyncio.CancelledError) as error:
            if stopped(error):
                raise
            self._why = life.why(error)
            raise Unreachable(self._why) from None
        return life

    async def aclose(self) -> None:
        """Close it for good."""
        self._closed = True
        if self._life is not None and self._life.loop is asyncio.get_running_loop():
            await self._life.aclose()
