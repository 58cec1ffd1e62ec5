"""The commands that only read: runs, conversations, agents."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message as ProtoMessage

from dualclaw import (
    Agent,
    Conversation,
    EffectClass,
    ListAgentsRequest,
    ListConversationsRequest,
    ListMessagesRequest,
    ListRunsRequest,
    Message,
    Role,
    Run,
    RunState,
    StopReason,
)
from dualclaw_clients.cli_render import (
    MAX_ARGS,
    MAX_RESULT,
    Terminal,
    safe,
    safe_json,
    safe_line,
    short_name,
    time_text,
)
from dualclaw_clients.engine_client import EngineClient

_T = TypeVar("_T", bound=ProtoMessage)
PAGE = 100


async def show_runs(
    client: EngineClient,
    terminal: Terminal,
    *,
    states: Sequence[RunState.ValueType],
    conversation_id: str,
    limit: int,
    as_json: bool,
) -> None:
    """List runs, newest first."""

    async def page(size: int, token: str) -> tuple[Sequence[Run], str]:
        request = ListRunsRequest(page_size=size, page_token=token, states=states, conversation_id=conversation_id)
        answer = await client.list_runs(request)
        return answer.runs, answer.next_page_token

    runs = await _some(page, limit, terminal)
    if as_json:
        _print_json(runs, terminal)
        return
    rows = [
        [
            run.id,
            short_name(RunState.Name, run.state, "RUN_STATE_"),
            run.agent,
            run.conversation_id,
            time_text(run.update_time),
            _ending(run),
        ]
        for run in runs
    ]
    terminal.table("", ["run", "state", "agent", "conversation", "changed", "ended by"], rows)


async def show_conversations(client: EngineClient, terminal: Terminal, *, limit: int, as_json: bool) -> None:
    """List conversations, the last changed first."""

    async def page(size: int, token: str) -> tuple[Sequence[Conversation], str]:
        answer = await client.list_conversations(ListConversationsRequest(page_size=size, page_token=token))
        return answer.conversations, answer.next_page_token

    found = await _some(page, limit, terminal)
    if as_json:
        _print_json(found, terminal)
        return
    rows = [[item.id, time_text(item.update_time), item.active_run_id, item.title] for item in found]
    terminal.table("", ["conversation", "changed", "active run", "title"], rows)


async def show_conversation(client: EngineClient, terminal: Terminal, conversation_id: str, *, as_json: bool) -> None:
    """Show a conversation with all its messages, the oldest first."""
    conversation = await client.get_conversation(conversation_id)
    if as_json:
        _print_json([conversation], terminal)
    else:
        active = f" · active run {safe_line(conversation.active_run_id)}" if conversation.active_run_id else ""
        terminal.line(f"{safe_line(conversation.title)} · {time_text(conversation.create_time)}{active}", "bold")
    token = ""
    while True:
        request = ListMessagesRequest(conversation_id=conversation_id, page_size=PAGE, page_token=token)
        answer = await client.list_messages(request)
        for message in answer.messages:
            if as_json:
                _print_json([message], terminal)
            else:
                _print_message(message, terminal)
        token = answer.next_page_token
        if not token:
            return


async def show_agents(client: EngineClient, terminal: Terminal, *, as_json: bool) -> None:
    """List the agents, the default one first."""

    async def page(size: int, token: str) -> tuple[Sequence[Agent], str]:
        answer = await client.list_agents(ListAgentsRequest(page_size=size, page_token=token))
        return answer.agents, answer.next_page_token

    agents = await _some(page, 500, terminal)
    if as_json:
        _print_json(agents, terminal)
        return
    rows = [
        [
            agent.name,
            str(len(agent.tools)),
            ", ".join(agent.models),
            ", ".join(f"{item.name}{'' if item.enabled else ' (off)'}" for item in agent.interceptors),
            agent.description,
        ]
        for agent in agents
    ]
    terminal.table("", ["agent", "tools", "models", "interceptors", "description"], rows)


async def show_agent(client: EngineClient, terminal: Terminal, name: str, *, as_json: bool) -> None:
    """Show one agent: its models, tools and interceptors."""
    agent = await client.get_agent(name)
    if as_json:
        _print_json([agent], terminal)
        return
    terminal.print(f"{safe_line(agent.name)}: {safe_line(agent.description)}")
    terminal.print(f"models: {safe_line(', '.join(agent.models)) or 'none'}")
    tools = [
        [
            tool.name,
            short_name(EffectClass.Name, tool.effect, "EFFECT_CLASS_"),
            "asks" if tool.needs_approval else "",
            tool.description,
        ]
        for tool in agent.tools
    ]
    terminal.table("tools", ["tool", "effect", "approval", "description"], tools)
    interceptors = [
        [str(item.order), item.name, "on" if item.enabled else "off", "switchable" if item.switchable else ""]
        for item in agent.interceptors
    ]
    terminal.table("interceptors", ["order", "interceptor", "state", "switch"], interceptors)


async def _some(
    page: Callable[[int, str], Awaitable[tuple[Sequence[_T], str]]], limit: int, terminal: Terminal
) -> list[_T]:
    found: list[_T] = []
    token = ""
    while len(found) < limit:
        items, token = await page(min(PAGE, limit - len(found)), token)
        found += items
        if not token:
            break
    if token or len(found) > limit:
        terminal.line(f"there are more than {limit}; see --limit", "dim")
    return found[:limit]


def _print_message(message: Message, terminal: Terminal) -> None:
    who = short_name(Role.Name, message.role, "ROLE_") or "unknown"
    terminal.print(f"{who}{f' ({safe_line(message.author)})' if message.author else ''}:")
    for part in message.parts:
        match part.WhichOneof("part"):
            case "text":
                terminal.print(safe(part.text))
            case "image" | "file" as kind:
                media = part.image if kind == "image" else part.file
                terminal.print(f"[{kind} {safe_line(media.name or media.url or media.media_type, MAX_ARGS)}]")
            case "reasoning":
                terminal.line(safe(part.reasoning.text), "dim")
            case "tool_call":
                call = part.tool_call
                terminal.print(f"▸ {safe_line(call.name)} {safe_line(call.args_json or '{}', MAX_ARGS)}")
            case "tool_result":
                text = " ".join(inner.text for inner in part.tool_result.parts if inner.HasField("text"))
                terminal.print(f"{'✗' if part.tool_result.is_error else '✓'} {safe_line(text, MAX_RESULT)}")
            case _:
                terminal.print("[a part newer than this program]")


def _print_json(items: Sequence[ProtoMessage], terminal: Terminal) -> None:
    for item in items:
        terminal.print(safe_json(MessageToDict(item, preserving_proto_field_name=True)))


def _ending(run: Run) -> str:
    if run.HasField("error"):
        return run.error.message
    return short_name(StopReason.Name, run.stop_reason, "STOP_REASON_")
