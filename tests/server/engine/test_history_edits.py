"""History edits: what the next model call is given, while the transcript stays what people said."""

from collections.abc import Sequence

import pytest

from dualclaw import ContentPart, HistoryEdit, InsertBefore, Message, Role, ToolCall
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor, Prompt
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.trace import Trace
from dualclaw_server.tools.feedback import feedback_tool

from .conftest import Asked, Engine, Opener, kinds, texts, turn
from .people import DONE, USER, Ledger, answer, asks, at_work, decide, ids, next_segment, pay, resume

ASSISTANT, SYSTEM, TOOL, WRITER = Role.ROLE_ASSISTANT, Role.ROLE_SYSTEM, Role.ROLE_TOOL, Role.ROLE_USER


class Sees(Interceptor):
    """Notes what every model call of the root is given."""

    def __init__(self) -> None:
        super().__init__(order=1000)
        self.given: list[list[str]] = []

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
        self.given.append([f"{_role(m)}:{texts(m)}" for m in prompt.messages])


def _role(message: Message) -> str:
    return Role.Name(message.role).removeprefix("ROLE_").lower()


def text(content: str, role: Role.ValueType = WRITER, message_id: str = "") -> Message:
    return Message(id=message_id, role=role, parts=[ContentPart(text=content)])


def insert(before: str, message: Message) -> HistoryEdit:
    return HistoryEdit(insert_before=InsertBefore(message_id=before, message=message))


async def ask_twice(engine: Engine) -> tuple[Asked, Sequence[Message]]:
    """Have one run answered, then a second one park at its calls; returns the messages of the conversation too."""
    first = await engine.ask("hello")
    asked = await engine.ask("go", conversation=first.conversation_id)
    return asked, await engine.messages(first.conversation_id)


def agent(sees: Sees, ledger: Ledger) -> Agent:
    return Agent("a", tools=[ledger.tool()], interceptors=[sees, asks()])


HELLO: dict[str, object] = {"when": {"user": "hello"}, "say": [{"text": "Hi."}]}
CALLS = turn(0, {"text": "Paying."}, pay("p1"), pay("p2"), user="^go$")


async def test_the_next_model_call_sees_the_edited_history(open_engine: Opener) -> None:
    """Append, replace, remove and insert in one request; the transcript is as before."""
    sees, ledger = Sees(), Ledger()
    engine = await open_engine(agent(sees, ledger), HELLO, CALLS, DONE, {"when": {}, "say": [{"text": "All done."}]})
    asked, before = await ask_twice(engine)
    hello, hi, go, _ = before
    edits = [
        HistoryEdit(append=text("Be quick.")),
        HistoryEdit(replace=text("Good day.", message_id=hello.id)),
        HistoryEdit(remove_message_id=hi.id),
        insert(go.id, text("It is late.", SYSTEM)),
        HistoryEdit(append=text("Very quick.")),
    ]
    ended = await answer(engine, asked, decide("p1"), decide("p2"), edits=edits)
    assert sees.given[-1] == [
        "user:Good day.", "system:It is late.", "user:go", "assistant:Paying.", "tool:", "tool:",
        "user:Be quick.", "user:Very quick.",
    ]  # fmt: skip
    after = await engine.messages(asked.conversation_id)
    assert [message.id for message in after[:4]] == [message.id for message in before]
    assert list(after[:4]) == list(before)
    assert kinds(after[4:]) == ["tool", "tool", "assistant"]
    assert ended.last.done.content == "All done."
    await engine.ask("hello", conversation=asked.conversation_id)
    assert sees.given[-1][:3] == ["user:hello", "assistant:Hi.", "user:go"]  # edits are of their run only
    assert "user:Be quick." not in sees.given[-1]


async def test_edits_reach_a_model_in_another_process_and_add_up(store: RunStore) -> None:
    """They survive with a run that goes on waiting, and later ones are made on top of them."""
    sees, ledger = Sees(), Ledger()
    script = HELLO, CALLS, DONE, {"when": {}, "say": [{"text": "All done."}]}
    async with at_work(store, agent(sees, ledger), *script) as engine:
        asked, messages = await ask_twice(engine)
        asked = await answer(
            engine, asked, edits=[HistoryEdit(append=text("One.")), insert(messages[0].id, text("Zero."))]
        )
        assert ids(asked) == ["p1", "p2"]
    async with at_work(store, agent(sees, ledger), *script) as engine:
        edits = [HistoryEdit(append=text("Two.")), HistoryEdit(remove_message_id=messages[0].id)]
        asked = await answer(engine, asked, decide("p1"), edits=edits)
        assert ids(asked) == ["p2"]
    async with at_work(store, agent(sees, ledger), *script) as engine:
        await answer(engine, asked, decide("p2"))
    assert sees.given[-1] == [
        "user:Zero.", "assistant:Hi.", "user:go", "assistant:Paying.", "tool:", "tool:", "user:One.", "user:Two.",
    ]  # fmt: skip
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]


async def test_a_question_answered_with_an_edit(open_engine: Opener) -> None:
    """The answer is the call's result, what was appended follows it."""
    sees = Sees()
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()], interceptors=[sees]),
        turn(0, {"call": "ask_user", "id": "q", "args": {"question": "?"}}),
        {"when": {}, "say": [{"text": "ok"}]},
    )
    asked = await engine.ask("go")
    note = HistoryEdit(append=text("Answer in French."))
    await answer(engine, asked, decide("q", "respond", response_json='"oui"'), edits=[note])
    assert sees.given[-1] == ["user:go", "assistant:", "tool:", "user:Answer in French."]


async def test_edits_that_cannot_be_made_are_refused_by_name(open_engine: Opener) -> None:
    """Unknown messages, calls and results, other roles, empty edits; each with its place, and nothing is stored."""
    sees, ledger = Sees(), Ledger()
    engine = await open_engine(agent(sees, ledger), HELLO, CALLS, DONE)
    asked, messages = await ask_twice(engine)
    hello, calling = messages[0].id, messages[3].id
    call = Message(role=ASSISTANT, parts=[ContentPart(tool_call=ToolCall(id="x", name="pay"))])
    edits = [
        HistoryEdit(),
        HistoryEdit(append=text("x", TOOL)),
        HistoryEdit(append=call),
        HistoryEdit(append=Message(role=WRITER)),
        HistoryEdit(replace=text("x", message_id="nowhere")),
        HistoryEdit(replace=text("x", ASSISTANT, calling)),
        HistoryEdit(remove_message_id=calling),
        HistoryEdit(remove_message_id="nowhere"),
        insert("nowhere", text("x")),
        insert(hello, Message()),
        HistoryEdit(remove_message_id=hello),
        HistoryEdit(remove_message_id=hello),
    ]
    with pytest.raises(FieldError) as wrong:
        await resume(engine, asked.key, decide("p1"), edits=edits)
    problems = {field: str(problem) for field, problem in wrong.value.fields.items()}
    assert set(problems) == {f"history_edits[{number}]" for number in (*range(10), 11)}
    assert "says nothing" in problems["history_edits[0]"]
    assert "role must be" in problems["history_edits[1]"]
    assert "parts must be" in problems["history_edits[2]"]
    assert "parts must be" in problems["history_edits[3]"]
    assert "no message 'nowhere'" in problems["history_edits[4]"]
    assert "stay together" in problems["history_edits[5]"]
    assert "no message" in problems["history_edits[11]"]
    with pytest.raises(EngineError) as forbidden:
        await resume(engine, asked.key, edits=[HistoryEdit(append=text("x"))], caller=USER)
    assert forbidden.value.reason == "PERMISSION_DENIED"
    assert (await engine.store.head(asked.key)).last_seq == len(asked.events)


async def test_nothing_comes_between_calls_and_their_results(open_engine: Opener) -> None:
    """A message can be put before the calls, not between their results; the results of an earlier batch count too."""
    sees, ledger = Sees(), Ledger()
    engine = await open_engine(agent(sees, ledger), turn(0, pay("p1")), turn(1, pay("p2")), turn(2, {"text": "ok"}))
    asked = await answer(engine, await engine.ask("go"), decide("p1"))
    assert ids(asked) == ["p2"]
    _, calling, result, again = await engine.messages(asked.conversation_id)
    with pytest.raises(FieldError, match="stay with their calls"):
        await resume(engine, asked.key, edits=[insert(result.id, text("x"))])
    edits = [insert(calling.id, text("before")), insert(again.id, text("between the batches"))]
    await answer(engine, asked, decide("p2"), edits=[*edits, HistoryEdit(append=text("after", SYSTEM))])
    assert sees.given[-1] == [
        "user:go", "user:before", "assistant:", "tool:", "user:between the batches", "assistant:", "tool:",
        "system:after",
    ]  # fmt: skip


async def test_an_edit_sent_again_is_known_though_it_could_not_be_made_again(open_engine: Opener) -> None:
    """The message is gone from the history, and still the same request streams the same segment."""
    sees, ledger = Sees(), Ledger()
    engine = await open_engine(agent(sees, ledger), HELLO, CALLS, {"when": {}, "say": [{"text": "All done."}]})
    asked, messages = await ask_twice(engine)
    edits = [HistoryEdit(remove_message_id=messages[0].id)]
    parked = await answer(engine, asked, decide("p1"), edits=edits, request_id="r")
    again = await resume(engine, asked.key, decide("p1"), edits=edits, request_id="r")
    assert (again.existing, again.first_seq) == (True, len(asked.events) + 1)
    with pytest.raises(FieldError, match="no message"):
        await resume(engine, asked.key, edits=edits, request_id="r2")
    assert ids(parked) == ["p2"]


async def test_a_cancelled_run_is_closed_in_the_transcript_whatever_was_appended(open_engine: Opener) -> None:
    """An appended message of the assistant is none of the conversation, so it closes no turn there."""
    sees, ledger = Sees(), Ledger()
    engine = await open_engine(agent(sees, ledger), HELLO, CALLS)
    asked, _ = await ask_twice(engine)
    asked = await answer(engine, asked, edits=[HistoryEdit(append=text("I will.", ASSISTANT))])
    await engine.cancel(asked.key)
    await next_segment(engine, asked)
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages)[-3:] == ["tool", "tool", "assistant"]
    assert "cancelled" in texts(messages[-1])
