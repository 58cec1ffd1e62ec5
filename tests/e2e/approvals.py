"""An agent that asks people, and what tests of approvals need around it: its script, its settings, its notes."""

import hashlib
import json
from pathlib import Path

AGENTS = '''
from pathlib import Path

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.outcome import End
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy
from dualclaw_server.tools.feedback import feedback_tool


class ClosedInterceptor(Interceptor):
    """Ends every run at once."""

    async def on_agent_start(self, trace):
        return End("Closed today.")


@tool(effect="once")
async def note(text: str, context: ToolContext, number: int = 0) -> str:
    """Add a line to the notes of the tenant."""
    with Path(f"{context.tenant}.notes").open("a", encoding="utf-8") as notes:
        notes.write(f"{text} {number}\\n")
    return f"noted {text}"


AGENT = Agent(
    "clerk",
    description="Keeps notes.",
    tools=[note, feedback_tool()],
    interceptors=[
        HitlInterceptor([Policy("note", prompt="May this be noted?")]),
        ClosedInterceptor(switchable=True, enabled=False),
    ],
)
'''

BIG = 9007199254740993
"""A number that a double cannot hold: what is approved must be what was shown, digit by digit."""
TURNS: list[dict[str, object]] = [
    {
        "when": {"user": "both", "step": 0},
        "say": [
            {"text": "Two notes."},
            {"call": "note", "args": {"text": "milk", "number": BIG}},
            {"call": "note", "args": {"text": "eggs"}},
        ],
    },
    {
        "when": {"user": "mixed", "step": 0},
        "say": [{"call": "note", "args": {"text": "milk"}}, {"call": "ask_user", "args": {"question": "How many?"}}],
    },
    {
        "when": {"user": "note", "step": 0},
        "say": [{"text": "One moment."}, {"call": "note", "args": {"text": "milk", "number": BIG}}],
    },
    {
        "when": {"user": "which", "step": 0},
        "say": [
            {
                "call": "ask_user",
                "args": {"question": "Which shop?", "choices": ["market", "<b>store</b>"], "only_choices": True},
            }
        ],
    },
    {
        "when": {"user": "offer", "step": 0},
        "say": [{"call": "ask_user", "args": {"question": "Which shop?", "choices": ["market", "store"]}}],
    },
    {"when": {"user": "ask", "step": 0}, "say": [{"call": "ask_user", "args": {"question": "Which shop?"}}]},
    {
        "when": {"user": "note|both|ask|mixed|which|offer", "step": 1},
        "say": [{"text": "Result: {{result}}", "chunk": 4}],
    },
    {"say": [{"text": "You said {{user}}"}]},
]
"""Questions a test asks: note, both, ask, which, offer, mixed; anything else is answered at once."""


def settings_of(folder: Path, **more: str) -> dict[str, str]:
    """Write script and agents into a folder; returns the settings of an engine that has them."""
    (folder / "clerk_agents.py").write_text(AGENTS, "utf-8")
    (folder / "clerk.json").write_text(json.dumps({"name": "clerk", "turns": TURNS}), "utf-8")
    return {
        "DUALCLAW_LISTEN": "127.0.0.1:0",
        "DUALCLAW_STORE": f"sqlite:{folder / 'clerk.db'}",
        "DUALCLAW_GRACE": "0",
        "DUALCLAW_MODEL": f"scripted:{folder / 'clerk.json'}",
        "DUALCLAW_AGENTS": "clerk_agents:AGENT",
        **more,
    }


def keys_of(folder: Path, *tenants: str) -> str:
    """Write a file of keys, one for each tenant and named like it; returns its path."""
    keys = [
        {
            "key_sha256": hashlib.sha256(name.encode()).hexdigest(),
            "tenant": name,
            "subject": f"person of {name}",
            "roles": ["user", "operator"],
        }
        for name in tenants
    ]
    path = folder / "clerk-keys.json"
    path.write_text(json.dumps(keys))
    return str(path)


def notes(folder: Path, tenant: str = "default") -> list[str]:
    """Return the lines that were noted for a tenant."""
    path = folder / f"{tenant}.notes"
    return path.read_text("utf-8").splitlines() if path.exists() else []
