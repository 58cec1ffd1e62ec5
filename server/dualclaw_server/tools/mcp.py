"""Tools of MCP servers: what an agent is given of them, and how.

    files = McpServer("files", command="npx", args=["-y", "@modelcontextprotocol/server-filesystem", "/data"])
    agent = Agent("helper", interceptors=[McpToolsInterceptor([files])])

Rules

- A server is opened when a run first wants its tools, shared by all runs, opened again when it is lost, and closed
  with ``aclose``. One object is one connection, however many agents use it.
- Tools are made for each segment of a run, so a run that is resumed meets the tools of that day. A server that cannot
  be had takes down nobody: a run goes on with the tools it had before (calls of them fail at once, saying why), or,
  when nothing is known of it yet, without them, and the model is told. Only a ``required`` server fails the run.
- A server is a stranger. Its texts go to the model as they are, so name only servers you would let talk to it; but
  what it sends is bounded in size, number and time, its schemas are checked before they are used
  (``mcp_schema``), and its hints count only when it is ``trusted``.
- Values of ``env`` and ``headers`` are in no log line, error or repr.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

from mcp import MCPError
from mcp_types import Tool as ListedTool
from pydantic import ValidationError

from dualclaw.errors import EngineError
from dualclaw_server.engine.interceptor import Interceptor, RunConfig
from dualclaw_server.engine.texts import TEXTS, Locale
from dualclaw_server.engine.tool import Tool, ToolContext, ToolOutput
from dualclaw_server.engine.trace import Trace
from dualclaw_server.tools.mcp_calls import EXTRAS, Calls, Target
from dualclaw_server.tools.mcp_questions import let_answers_through
from dualclaw_server.tools.mcp_schema import description_of, effect_of, schema_of, tool_name
from dualclaw_server.tools.mcp_spec import Protocol, Spec, Unreachable, reason_of

log = logging.getLogger(__name__)

_CONTEXT = "\x00context"
"""The parameter that takes the ToolContext; no argument has such a name."""


class McpServer:
    """An MCP server, by the command that starts it or by its address.

    Args:
        name: 1 to 32 letters and digits, with single - or _ between them; begins the names of its tools.
        command: program that speaks MCP on its pipes, found on PATH.
        args: of the command.
        env: variables of the process; of this one's it gets PATH, HOME, LANG-like ones the SDK finds harmless.
        cwd: where it runs; empty: here.
        url: address of a Streamable HTTP endpoint.
        headers: of every request to it, such as {"authorization": "Bearer ..."}.
        trusted: True: believe its hints on what its tools do to the world; they then may be repeated after a crash.
        required: True: no run begins without it.
        only: names of the tools to take, as the server has them; None: all.
        timeout: seconds a call may be silent; reports of progress begin it anew.
        max_time: seconds a call may take in all.
        connect_timeout: seconds to open the connection, and to list the tools.
        hold_time: seconds a call that asks people is held open for them (protocols before 2026-07-28).
        max_message: bytes of one message.
        protocol: "auto" takes the newest revision both know; "legacy" begins with the handshake of 2025 and before.

    Raises:
        ValueError: naming everything that is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        command: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        cwd: str = "",
        url: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        trusted: bool = False,
        required: bool = False,
        only: Collection[str] | None = None,
        timeout: float = 60.0,
        max_time: float = 600.0,
        connect_timeout: float = 20.0,
        hold_time: float = 900.0,
        max_message: int = 8 * 1024 * 1024,
        protocol: Protocol = "auto",
    ) -> None:
        self.spec = Spec(
            name=name,
            command=command,
            args=args,
            env=env,
            cwd=cwd,
            url=url,
            headers=headers,
            trusted=trusted,
            required=required,
            only=frozenset(only) if only is not None else None,
            timeout=timeout,
            max_time=max_time,
            connect_timeout=connect_timeout,
            hold_time=hold_time,
            max_message=max_message,
            protocol=protocol,
        )
        self._calls = Calls(self.spec)
        self._listed: Sequence[ListedTool] | None = None
        self._made: dict[Locale, tuple[Sequence[ListedTool], tuple[Tool, ...]]] = {}

    def __repr__(self) -> str:
        return f"McpServer({self.spec.name!r})"

    async def tools(self, locale: Locale = "en") -> tuple[Tool, ...]:
        """Return the tools it has now. Raises Unreachable."""
        try:
            life = await self._calls.connection.life()
            self._listed = await life.tools()
        except Unreachable:
            raise
        except (MCPError, ValidationError, TimeoutError, RuntimeError) as error:
            told = "no list within the time" if isinstance(error, TimeoutError) else reason_of(error)
            raise Unreachable(self.spec.clean(f"its tools cannot be listed: {told}")) from None
        return self.known_tools(locale)

    def known_tools(self, locale: Locale = "en") -> tuple[Tool, ...]:
        """Return the tools it had when it was asked last; none when it never was."""
        listed = self._listed or ()
        made = self._made.get(locale)
        if made is None or made[0] is not listed:
            wanted = [tool for tool in listed if self.spec.only is None or tool.name in self.spec.only]
            tools = {tool.name: tool for tool in (self._tool(item, locale) for item in wanted)}
            self._made[locale] = made = (listed, tuple(tools.values()))
        return made[1]

    async def aclose(self) -> None:
        """Give up its calls and close it for good; takes a few seconds at most."""
        await self._calls.aclose()

    def _tool(self, listed: ListedTool, locale: Locale) -> Tool:
        spec, calls = self.spec, self._calls
        name, effect = tool_name(spec.name, listed.name), effect_of(spec, listed)
        schema, note = schema_of(spec, listed)
        target = Target(name, listed.name, effect, TEXTS[locale])

        async def call(**values: object) -> ToolOutput:
            context = cast("ToolContext", values.pop(_CONTEXT))
            return await calls.call(target, values, context)

        return Tool(
            name=name,
            description=description_of(listed, note),
            parameters=schema,
            function=call,
            kind="mcp",
            server=spec.name,
            effect=effect,
            timeout=spec.max_time,
            context_parameter=_CONTEXT,
        )


@dataclass(frozen=True, slots=True)
class _Texts:
    missing: str


_TEXTS: Mapping[Locale, _Texts] = MappingProxyType(
    {
        "en": _Texts(missing="The tools of {servers} are not available at the moment."),
        "zh": _Texts(missing="{servers} 的工具目前不可用。"),
    }
)


class McpToolsInterceptor(Interceptor):
    """Gives an agent the tools of MCP servers.

    Args:
        servers: each with a name of its own; they may be shared with other agents.
        locale: language of what the engine says of them.
        name: unique within an agent.
        order: among the agent's interceptors.

    Raises:
        ValueError: two servers have one name.
    """

    def __init__(
        self, servers: Sequence[McpServer], *, locale: Locale = "en", name: str = EXTRAS, order: int = 0
    ) -> None:
        super().__init__(name=name, order=order)
        self.servers = tuple(servers)
        self._locale = locale
        names = [server.spec.name for server in servers]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"MCP servers must have names of their own, repeated: {', '.join(repeated)}")

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Add the tools there are, and let answers to what servers asked people reach them."""
        let_answers_through(trace)
        _forget_ended_calls(trace)
        found = await asyncio.gather(*(self._tools_of(server) for server in self.servers))
        tools = {tool.name: tool for tool in config.tools}
        missing = []
        for server, offered in zip(self.servers, found, strict=True):
            if offered is None:
                missing.append(server.spec.name)
            for tool in offered or ():
                if tools.setdefault(tool.name, tool) is not tool:
                    log.warning("MCP tool %s is left out: the agent has one of that name", tool.name)
        instructions = config.instructions
        if missing:
            note = _TEXTS[self._locale].missing.format(servers=", ".join(missing))
            instructions = f"{instructions}\n\n{note}".strip()
        return replace(config, tools=tuple(tools.values()), instructions=instructions)

    async def aclose(self) -> None:
        """Close the servers for good."""
        await asyncio.gather(*(server.aclose() for server in self.servers))

    async def _tools_of(self, server: McpServer) -> tuple[Tool, ...] | None:
        """Return a server's tools; None when nothing is known of it. Raises EngineError when it is required."""
        try:
            return await server.tools(self._locale)
        except Unreachable as error:
            if server.spec.required:
                text = f"MCP server {server.spec.name}, which the agent needs, cannot be had: {error}"
                raise EngineError("TOOL_FAILED", text) from None
            log.warning("MCP server %s cannot be had: %s", server.spec.name, error)
            return server.known_tools(self._locale) or None


def _forget_ended_calls(trace: Trace) -> None:
    """Drop what was kept of calls that people have ended while they waited."""
    kept = trace.extras(EXTRAS)
    open_calls = {state.call.id for state in trace.checkpoint.calls}
    for call_id in list(kept):
        if call_id not in open_calls:
            kept.delete(call_id)
