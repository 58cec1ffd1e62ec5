"""An agent with the tools of an MCP server, which is started when the first run wants it.

Serve it with ``DUALCLAW_AGENTS=mcp_agent:AGENT`` and this folder on ``PYTHONPATH``; needs the package ``mcp``. Ask it
to keep a note: the server asks you for a title, the run waits for your answer, and the next message gives it.
"""

import sys
from pathlib import Path

from dualclaw_server.engine.agent import Agent
from dualclaw_server.tools.mcp import McpServer, McpToolsInterceptor

NOTES = McpServer(
    "notes",
    command=sys.executable,
    args=[str(Path(__file__).with_name("mcp_notes.py"))],
    trusted=True,  # it is ours: list_notes is believed to be read-only, so it may be repeated after a crash
)

AGENT = Agent(
    name="notes",
    description="Keeps notes.",
    instructions="You keep the user's notes. Use the notes tools for everything about them.",
    interceptors=[McpToolsInterceptor([NOTES])],
)
