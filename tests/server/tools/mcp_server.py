"""A real MCP server for tests, written with the SDK: tools that answer, fail, wait and ask people.

Run as a script it speaks on its pipes: ``mcp_server.py LOG``. What tools do is written to LOG, a line each.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.caching import CacheHint
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import (
    BlobResourceContents,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import BaseModel

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000154a24f5d0000000049454e44ae426082"
)
READ = ToolAnnotations(read_only_hint=True)


class Table(BaseModel):
    seats: int


class Guest(BaseModel):
    name: str
    vegetarian: bool = False


def make_server(log: Path) -> MCPServer:
    """Return a server that writes what its tools do to ``log``."""
    server = MCPServer("test", cache_hints={"tools/list": CacheHint(ttl_ms=3_600_000)})
    gates: dict[str, asyncio.Event] = {}

    def note(text: str) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    @server.tool(annotations=READ)
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        note(f"add {a} {b}")
        return a + b

    @server.tool(structured_output=False)
    def media() -> list[object]:
        """Return a bit of everything."""
        return [
            "text",
            Image(data=PIXEL, format="png"),
            ResourceLink(
                type="resource_link", uri="https://example.com/a.pdf", name="a.pdf", mime_type="application/pdf"
            ),
            ResourceLink(type="resource_link", uri="memo://1", name="memo"),
            EmbeddedResource(type="resource", resource=TextResourceContents(uri="memo://2", text="inside")),
            EmbeddedResource(
                type="resource", resource=BlobResourceContents(uri="memo://3", blob="QUJD", mime_type="application/x")
            ),
        ]

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ToolError("the kitchen is closed")

    @server.tool()
    async def wait(name: str, context: Context, progress: bool = False) -> str:
        """Wait until ``open`` opens the gate of that name, with reports of progress if wanted."""
        note(f"wait {name}")
        gate = gates.setdefault(name, asyncio.Event())
        try:
            while not gate.is_set():
                if progress:
                    await context.report_progress(1, None, "on it")
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            note(f"cancelled {name}")
            raise
        return "through"

    @server.tool(annotations=READ)
    async def open_gate(name: str) -> str:
        """Open a gate."""
        gates.setdefault(name, asyncio.Event()).set()
        return "open"

    @server.tool(annotations=READ)
    def pid() -> str:
        """Tell the process."""
        return str(os.getpid())

    async def ask_seats(dish: str) -> Elicit[Table]:
        return Elicit(f"How many seats for {dish}?", Table)

    @server.tool()
    async def book(dish: str, table: Annotated[Table, Resolve(ask_seats)]) -> str:
        """Book a table, asking people for the seats before anything is done."""
        note(f"book {dish} {table.seats}")
        return f"{table.seats} seats for {dish}"

    async def invite(context: Context) -> str:
        note("invite")
        found = await context.elicit("Who comes?", Guest)
        note(f"invite {found.action}")
        if found.action != "accept":
            return f"nobody, {found.action}"
        again = await context.elicit("And who else?", Guest)
        names = [found.data.name] + ([again.data.name] if again.action == "accept" else [])
        note(f"invited {' '.join(names)}")
        return f"invited {' and '.join(names)}"

    server.tool(name="invite", annotations=READ, description="Invite guests, asking in the middle.")(invite)
    server.tool(name="invite_once", description="Invite guests, asking in the middle; not to be repeated.")(invite)

    @server.tool()
    async def learn(name: str, context: Context) -> str:
        """Add a tool to this server and say so."""

        def learned() -> str:
            return f"learned {name}"

        server.add_tool(learned, name=name, description="learned")
        await context.notify_tools_changed()  # since 2026-07-28
        await context.request_context.session.send_tool_list_changed()  # before
        return "learned"

    async def plain(context: Context) -> list[TextContent]:
        return [TextContent(type="text", text='{"a": 1}')]

    server.tool(name="odd.name with spaces", structured_output=False, description="Has no legal name.")(plain)
    return server


if __name__ == "__main__":
    make_server(Path(sys.argv[1])).run("stdio")
