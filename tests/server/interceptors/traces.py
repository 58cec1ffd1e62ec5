"""Traces as a run at work would have them, with services that live in memory, and histories for them."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from dualclaw import ContentPart, Media, Message, ReasoningPart, Role, RunRequest, ToolCall, ToolResult, Usage
from dualclaw_server.engine.agent import Limits
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import CallPhase, CallState, Checkpoint, RunRecord
from dualclaw_server.engine.interceptor import ModelCall, Prompt, RunConfig
from dualclaw_server.engine.model import ChatModel, ModelRequest, ModelResponse
from dualclaw_server.engine.store import RunKey, RunMessage
from dualclaw_server.engine.tool import Tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.models.scripted import ScriptedModel

MODEL = ScriptedModel.parse('{"name": "test-model", "turns": [{"say": [{"text": "hello"}]}]}')
TRACE_ID, SPAN_ID = "a" * 32, "b" * 16


class MemoryServices:
    """Answers a trace's questions from memory; ``answers`` gives the answer to a request, or raises."""

    def __init__(self, answers: Callable[[ModelRequest], str] | None = None) -> None:
        self.answers = answers
        self.asked: list[ModelRequest] = []
        self.kept: dict[str, bytes] = {}

    async def ask(self, request: ModelRequest, model: ChatModel | None) -> ModelResponse:
        self.asked.append(request)
        assert self.answers is not None
        return response(self.answers(request))

    async def recall(self, name: str) -> bytes | None:
        return self.kept.get(name)

    async def keep(self, name: str, value: bytes) -> None:
        self.kept[name] = value


def make_trace(
    history: Sequence[Message] = (),
    own: Sequence[Message] = (),
    *,
    roles: Sequence[str] = ("user",),
    services: MemoryServices | None = None,
    checkpoint: Checkpoint | None = None,
    run_id: str = "run",
    parent: Trace | None = None,
    agent: str = "agent",
) -> Trace:
    question = own[0] if own else user("what?", message_id="question")
    record = RunRecord(
        request=RunRequest(agent="agent", conversation_id="conversation", message=question),
        subject="anna",
        roles=roles,
        trace_id=TRACE_ID,
        parent_span_id=SPAN_ID,
    )
    messages = [RunMessage(place, message) for place, message in enumerate(own or [question])]
    checkpoint = checkpoint or Checkpoint(segment=1, trace_id=TRACE_ID)
    key = RunKey("tenant", run_id)
    trace = Trace(key, record, checkpoint, history, messages, agent=agent, parent=parent, call_id="c" if parent else "")
    trace.services = services
    return trace


def message(role: Role.ValueType, *parts: ContentPart, message_id: str = "") -> Message:
    return Message(id=message_id, role=role, parts=parts)


def user(text: str, *, message_id: str = "") -> Message:
    return message(Role.ROLE_USER, ContentPart(text=text), message_id=message_id)


def system(text: str, *, message_id: str = "") -> Message:
    return message(Role.ROLE_SYSTEM, ContentPart(text=text), message_id=message_id)


def said(text: str, *, message_id: str = "") -> Message:
    return message(Role.ROLE_ASSISTANT, ContentPart(text=text), message_id=message_id)


def called(*ids: str, message_id: str = "", args: str = "", reasoning: str = "") -> Message:
    parts = [ContentPart(tool_call=ToolCall(id=call_id, name="look", args_json=args)) for call_id in ids]
    if reasoning:
        parts.insert(0, ContentPart(reasoning=ReasoningPart(text=reasoning, signature="anthropic:sig")))
    return message(Role.ROLE_ASSISTANT, *parts, message_id=message_id)


def result(call_id: str, text: str, *, message_id: str = "") -> Message:
    part = ContentPart(tool_result=ToolResult(call_id=call_id, parts=[ContentPart(text=text)]))
    return message(Role.ROLE_TOOL, part, message_id=message_id)


def image(message_id: str = "") -> Message:
    part = ContentPart(image=Media(media_type="image/png", data=b"x" * 10_000))
    return message(Role.ROLE_USER, part, message_id=message_id)


def response(text: str = "", *, usage: Usage | None = None, model: str = "") -> ModelResponse:
    return ModelResponse(said(text), "stop", usage or Usage(), model=model)


def prompt_of(trace: Trace, *, instructions: str = "", tools: Sequence[Tool] = ()) -> Prompt:
    return Prompt(trace.context(), instructions, list(tools))


def config_of(*tools: Tool) -> RunConfig:
    return RunConfig("", tools, MODEL, Limits(), None)


def call_of(trace: Trace, call_id: str = "c1", name: str = "look", args: str = "", tool: Tool | None = None) -> Call:
    state = CallState(call=ToolCall(id=call_id, name=name, args_json=args), phase=CallPhase.CALL_PHASE_WAITING)
    trace.checkpoint.calls.append(state)
    return Call(trace, trace.checkpoint.calls[-1], tool)


def model_call(trace: Trace, *, attempt: int = 1) -> ModelCall:
    return ModelCall(trace, "test-model", ModelRequest(trace.context()), attempt)


def history_of(turns: int, size: int = 400) -> list[Message]:
    """Turns of a question, a call with its result, and an answer."""
    return [
        item
        for n in range(turns)
        for item in (
            user(f"question {n} " + "q" * size, message_id=f"u{n}"),
            called(f"c{n}", message_id=f"a{n}"),
            result(f"c{n}", f"result {n} " + "r" * size, message_id=f"r{n}"),
            said(f"answer {n} " + "s" * size, message_id=f"s{n}"),
        )
    ]


def run_of(history: Sequence[Message], window: int, *own: Message, services: MemoryServices | None = None) -> Trace:
    trace = make_trace(history, own or [user("now?", message_id="question")], services=services)
    trace.context_window = window
    return trace


def ids(messages: Sequence[Message]) -> list[str]:
    return [item.id for item in messages]


# Histories of any form, also such as no engine would make: results without calls and before them, ids that repeat,
# calls without results, batches, empty messages, system messages anywhere.

CALL_IDS = st.sampled_from(["a", "b", "c", "d"])
TEXTS = st.integers(0, 3_000).map(lambda n: "word " * (n // 5))
MESSAGES = st.one_of(
    TEXTS.map(user),
    TEXTS.map(said),
    TEXTS.map(system),
    st.lists(CALL_IDS, min_size=1, max_size=3).map(lambda ids: called(*ids, reasoning="hm")),
    st.builds(result, CALL_IDS, TEXTS),
    st.just(message(Role.ROLE_ASSISTANT)),
    st.just(image()),
    st.tuples(CALL_IDS, CALL_IDS).map(lambda ids: message(Role.ROLE_USER, *(result(i, "r").parts[0] for i in ids))),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    messages = draw(st.lists(MESSAGES, max_size=14))
    made = []
    for place, item in enumerate(messages):
        copy = Message()
        copy.CopyFrom(item)
        copy.id = f"m{place}"
        made.append(copy)
    return made
