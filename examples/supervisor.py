"""A supervisor and its workers: one agent talks to the user and hands out the work, two others do it.

The workers are agents as tools: each is asked one thing, sees nothing of the conversation, and answers the supervisor.
What the researcher found reaches the writer through a session value (``output_key``), so the supervisor need not
repeat it. Run it, without a model of your own, from the folder above this one:

    DUALCLAW_AGENTS=examples.supervisor:AGENTS DUALCLAW_MODEL=scripted:examples/supervisor.json dualclaw-server
"""

from pathlib import Path

from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.tool import NotDone, ToolContext, tool
from dualclaw_server.tools.documents import search_documents

FINDINGS = "findings"


@tool(effect="read")
async def read_findings(context: ToolContext) -> str:
    """Read what the researcher has found."""
    found = context.trace.session.get(FINDINGS)
    if not isinstance(found, str):
        raise NotDone("the researcher has found nothing yet")
    return found


RESEARCHER = Agent(
    "researcher",
    description="Finds out what the documents say about a question.",
    instructions="You are a researcher. Search the documents and answer with what they say and where.",
    tools=[search_documents(Path(__file__).parent / "documents")],
    output_key=FINDINGS,
    limits=Limits(max_steps=6, wall_time=120),
)
WRITER = Agent(
    "writer",
    description="Writes a short text about what the researcher has found.",
    instructions="You are a writer. Read the findings, then write the text you are asked for, and nothing else.",
    tools=[read_findings],
    limits=Limits(max_steps=4, wall_time=120),
)
SUPERVISOR = Agent(
    "supervisor",
    description="Answers questions with a researcher and a writer.",
    instructions="You lead a researcher and a writer. Have the researcher find out, then the writer write. Say in one "
    "sentence what was done, and give the text as it is.",
    sub_agents=[RESEARCHER, WRITER],
)
AGENTS = (SUPERVISOR,)
