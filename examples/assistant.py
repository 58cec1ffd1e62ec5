"""The agent that `make run` and `make demo` load: a calculator, a clock, a search over a small folder, and a note pad.

Notes need a person's approval, and the guards that most agents want are on. Serve it, or a copy of your own, with
``DUALCLAW_AGENTS=assistant:AGENT`` and this folder on ``PYTHONPATH``.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from dualclaw_server.engine.tool import tool
from dualclaw_server.interceptors import (
    ContextCompressionInterceptor,
    HitlInterceptor,
    Policy,
    StopLoopInterceptor,
    ToolRetryInterceptor,
    ToolSanitizerInterceptor,
)
from dualclaw_server.tools.assistant import AGENT as BUILT_IN
from dualclaw_server.tools.documents import search_documents
from dualclaw_server.tools.feedback import feedback_tool

DOCUMENTS = Path(__file__).parent / "documents"
NOTES = Path("var/notes.txt")


@tool
async def note_down(text: str) -> str:
    """Write a note down for the user. A person has to approve it first.

    Args:
        text: The note.
    """

    def append() -> None:
        NOTES.parent.mkdir(parents=True, exist_ok=True)
        with NOTES.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    await asyncio.to_thread(append)
    return f"Noted: {text}"


AGENT = replace(
    BUILT_IN,
    description="A helpful assistant with a calculator, a clock, a folder of documents and a note pad.",
    instructions=f"{BUILT_IN.instructions} Use search_documents for questions about dualclaw, and name your sources. "
    "Use note_down when the user wants something noted.",
    tools=(*BUILT_IN.tools, search_documents(DOCUMENTS), note_down, feedback_tool()),
    interceptors=(
        HitlInterceptor([Policy("note_down", prompt="Write this note? {{args.text}}")]),
        StopLoopInterceptor(),
        ToolRetryInterceptor(),
        ToolSanitizerInterceptor(),
        ContextCompressionInterceptor(),
    ),
)
