"""A small MCP server: notes that live as long as its process. Speaks on its pipes."""

from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

server = MCPServer("notes")
notes: list[str] = []


class Title(BaseModel):
    """What people are asked for."""

    title: str = Field(description="A few words")


async def ask_title() -> Elicit[Title]:
    """Ask people under which title a note is kept."""
    return Elicit("Under which title shall the note be kept?", Title)


@server.tool()
async def keep_note(text: str, title: Annotated[Title, Resolve(ask_title)]) -> str:
    """Keep a note. People are asked for its title."""
    notes.append(f"{title.title}: {text}")
    return f"kept as {title.title!r}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def list_notes() -> list[str]:
    """List the notes there are."""
    return notes


if __name__ == "__main__":
    server.run("stdio")
