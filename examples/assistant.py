"""The agent that `make run` and `make demo` load: a calculator, a clock, and a search over a small folder.

Serve it, or a copy of your own, with ``DUALCLAW_AGENTS=assistant:AGENT`` and this folder on ``PYTHONPATH``.
"""

from dataclasses import replace
from pathlib import Path

from dualclaw_server.tools.assistant import AGENT as BUILT_IN
from dualclaw_server.tools.documents import search_documents

DOCUMENTS = Path(__file__).parent / "documents"

AGENT = replace(
    BUILT_IN,
    description="A helpful assistant with a calculator, a clock and a folder of documents.",
    instructions=f"{BUILT_IN.instructions} Use search_documents for questions about dualclaw, and name your sources.",
    tools=(*BUILT_IN.tools, search_documents(DOCUMENTS)),
)
