"""A strategy of your own: look something up first, whatever the model believes it knows, then go on as usual.

A strategy is a class with a name and ``run``. It keeps nothing of a run in itself: where the run stands is asked of
the checkpoint, here of the number of model calls, so it goes on rightly after a crash or a question to people too.
Run it from the folder above this one:

    DUALCLAW_AGENTS=examples.own_strategy:AGENTS DUALCLAW_MODEL=scripted:examples/own_strategy.json dualclaw-server
"""

from pathlib import Path

from dualclaw import StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.model import ModelOptions
from dualclaw_server.engine.scope import Scope
from dualclaw_server.engine.strategy import ReAct
from dualclaw_server.tools.documents import search_documents


class LookFirst:
    """Have the model call one tool before anything else, then reason and act until it answers."""

    name = "look_first"

    def __init__(self, tool: str) -> None:
        """``tool`` is the name of the tool to be called first."""
        self._options = ModelOptions(tool_choice=tool)
        self._afterwards = ReAct()

    async def run(self, scope: Scope) -> StopReason.ValueType:
        """Go on from where the run stands."""
        first = scope.trace.model_calls == 0
        if first and not await scope.reason(tools=True, options=self._options):
            return StopReason.STOP_REASON_FINISHED  # a model that cannot be made to call has answered
        return await self._afterwards.run(scope)


SEARCH = search_documents(Path(__file__).parent / "documents")
AGENT = Agent(
    "librarian",
    description="Answers from the documents only.",
    instructions="You are a librarian. Answer from what the documents say, and name the one you have it from.",
    tools=[SEARCH],
    strategy=LookFirst(SEARCH.name),
)
AGENTS = (AGENT,)
