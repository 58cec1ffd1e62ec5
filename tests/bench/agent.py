"""Our agents of the benchmarks: the two tools of the tool scenario, and nothing an ordinary agent would not have.

``bench`` is what everything is measured with; ``asking`` waits for people before it calls a tool.
"""

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.tool import tool
from dualclaw_server.interceptors.hitl import HitlInterceptor

INSTRUCTIONS = "You are a helpful assistant. Use the tools."


@tool(effect="read")
async def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city.
    """
    return f"{city}: 21 degrees, sunny"


@tool(effect="read")
async def population(city: str) -> str:
    """Tell how many people live in a city.

    Args:
        city: The city.
    """
    return f"{city}: 24 million"


_TOOLS = (weather, population)
AGENTS = (
    Agent("bench", instructions=INSTRUCTIONS, tools=_TOOLS),
    Agent("asking", instructions=INSTRUCTIONS, tools=_TOOLS, interceptors=[HitlInterceptor(default=True)]),
)
