"""The protocol's own Python client against the claw and a real engine, by JSON-RPC and by gRPC."""

import asyncio

import pytest
from a2a.client.errors import A2AClientError
from a2a.types.a2a_pb2 import (
    TASK_STATE_CANCELED,
    TASK_STATE_COMPLETED,
    TASK_STATE_INPUT_REQUIRED,
    TASK_STATE_SUBMITTED,
    TASK_STATE_WORKING,
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Part,
    SendMessageConfiguration,
    SubscribeToTaskRequest,
    TaskPushNotificationConfig,
)
from a2a.utils.errors import (
    ContentTypeNotSupportedError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)

from dualclaw import Run, RunState
from dualclaw.events import make_delta, make_done
from dualclaw_clients.a2a.parts import data_part, data_value

from .conftest import BINDINGS, collect, message, opened


async def test_an_answer_streams_as_task_then_chunks_then_completed(client):
    """Task first; the artifact's chunks make the answer; the last chunk is marked; the last state is completed."""
    seen = await collect(client.send_message(message("conformance: text")))
    assert seen.kinds[0] == "task"
    assert seen.kinds.count("task") == 1
    assert seen.states == ["SUBMITTED", "WORKING", "COMPLETED"]
    assert seen.text == "Hello 你好 🙂"
    assert seen.closed == {"answer-1"}
    assert seen.kinds[-1] == "status_update"
    assert seen.first.history[0].parts[0].text == "conformance: text"


async def test_steps_are_status_updates_without_arguments_and_results(client):
    """Who works with a task sees which tools began and ended, and nothing of what is inside them."""
    seen = await collect(client.send_message(message("conformance: tool")))
    told = [u.status_update.status.message.parts[0].text for u in seen.updates if u.status_update.status.message.parts]
    assert sorted(told) == [
        "fails: failed", "fails: started", "fetch: done", "fetch: started", "look: done", "look: started",
    ]  # fmt: skip
    assert "seen: it" not in str(seen.updates)
    assert seen.text == "Two of three went well."


async def test_a_rewind_replaces_the_artifact(client):
    """Text that was withdrawn is replaced whole, under the same artifact id, by append = false."""
    seen = await collect(client.send_message(message("conformance: rewind")))
    assert seen.artifacts == {"answer-1": "This is right."}
    updates = [u.artifact_update for u in seen.updates if u.HasField("artifact_update")]
    assert not updates[0].append
    assert sum(not update.append for update in updates) == 2


async def test_a_failed_run_is_a_failed_task_with_its_text_so_far(client):
    """The reason is told as text and as data; what was said before stays."""
    seen = await collect(client.send_message(message("conformance: error")))
    assert seen.states[-1] == "FAILED"
    assert seen.text == "So far "
    status = seen.updates[-1].status_update.status
    assert data_value(status.message.parts[1])["diagnosis"]["code"] == "model.bad_response"
    task = await client.get_task(GetTaskRequest(id=seen.task_id))
    assert task.status.message.parts == status.message.parts


async def test_an_approval_in_words_resumes_the_task(client):
    """Input-required says what is asked and how to answer; the words do answer it; both answers are artifacts."""
    asked = await collect(client.send_message(message("conformance: approval")))
    assert asked.states[-1] == "INPUT_REQUIRED"
    assert '{"to": "a", "amount": 5}' in asked.status_text
    assert "`approve pay-a`" in asked.status_text
    seen = await collect(client.send_message(message("approve pay-a", task_id=asked.task_id)))
    assert seen.task_id == asked.task_id
    assert (seen.states[0], seen.states[-1]) == ("WORKING", "COMPLETED")
    assert list(seen.artifacts.values()) == ["One moment. ", "Done: paid 5 to a."]


async def test_a_rejection_with_a_reason_resumes_the_task(client):
    """Refusing is an answer too, and no payment is made."""
    asked = await collect(client.send_message(message("conformance: approval")))
    seen = await collect(client.send_message(message("reject pay-a too much", task_id=asked.task_id)))
    assert seen.states[-1] == "COMPLETED"
    assert seen.text == "It was refused."


async def test_decisions_as_data_answer_one_by_one(client):
    """Of two approvals one is answered: the task goes on waiting for the other, which is then answered in words."""
    asked = await collect(client.send_message(message("conformance: approvals")))
    questions = data_value(asked.updates[-1].status_update.status.message.parts[1])["questions"]
    assert [question["interrupt_id"] for question in questions] == ["pay-a", "pay-b"]
    decision = {"interrupt_id": "pay-a", "action": "approve", "args_hash": questions[0]["args_hash"]}
    parts = [data_part({"decisions": [decision]})]
    one = await collect(client.send_message(message(parts=parts, task_id=asked.task_id)))
    assert one.states[-1] == "INPUT_REQUIRED"
    assert "pay-b" in one.status_text
    assert "pay-a" not in one.status_text
    both = await collect(client.send_message(message("reject pay-b", task_id=asked.task_id)))
    assert (both.states[-1], both.text) == ("COMPLETED", "All is decided.")


@pytest.mark.parametrize("text", ["maybe", "approve pay-z", "approve pay-a but only half"])
async def test_an_unclear_answer_leaves_the_task_waiting_and_says_how_to_answer(client, text):
    """Nothing is carried out on a guess: the answer is the task, input-required, with what would be right."""
    asked = await collect(client.send_message(message("conformance: approval")))
    seen = await collect(client.send_message(message(text, task_id=asked.task_id)))
    assert seen.kinds == ["task"]
    assert seen.states == ["INPUT_REQUIRED"]
    assert "That was no answer" in seen.status_text
    assert "`approve pay-a`" in seen.status_text
    again = await client.get_task(GetTaskRequest(id=asked.task_id))
    assert again.status.state == TASK_STATE_INPUT_REQUIRED


async def test_what_the_engine_does_not_take_leaves_the_task_waiting(client):
    """A hash that does not match is refused by the engine; the task says so and still waits."""
    asked = await collect(client.send_message(message("conformance: approval")))
    parts = [data_part({"decisions": [{"interrupt_id": "pay-a", "action": "approve", "args_hash": "0" * 64}]})]
    seen = await collect(client.send_message(message(parts=parts, task_id=asked.task_id)))
    assert seen.states == ["INPUT_REQUIRED"]
    assert "hash" in seen.status_text


async def test_any_words_answer_a_question(client):
    """The one open question takes the message for its answer."""
    asked = await collect(client.send_message(message("conformance: question")))
    assert "Which colour?" in asked.status_text
    seen = await collect(client.send_message(message("yes", task_id=asked.task_id)))
    assert seen.states[-1] == "COMPLETED"
    assert "yes" in seen.text


async def test_a_message_in_the_context_answers_its_question_and_goes_on_with_its_task(client):
    """Without a task id the engine's own rule holds: the task that asked goes on, with its past."""
    asked = await collect(client.send_message(message("conformance: question")))
    seen = await collect(client.send_message(message("blue", context_id=asked.first.context_id)))
    assert seen.task_id == asked.task_id
    assert seen.states[-1] == "COMPLETED"
    assert "blue" in seen.text


async def test_a_context_goes_on_with_a_new_task(client):
    """A message with a context id is a new task of the same conversation."""
    first = await collect(client.send_message(message("conformance: text")))
    second = await collect(client.send_message(message("conformance: tool", context_id=first.first.context_id)))
    assert second.first.context_id == first.first.context_id
    assert second.task_id != first.task_id
    page = await client.list_tasks(ListTasksRequest(context_id=first.first.context_id))
    assert {task.id for task in page.tasks} == {first.task_id, second.task_id}


async def test_a_message_sent_twice_is_one_task(client):
    """A client that lost the answer sends its message again and gets the same task and the same answer."""
    sent = message("conformance: text", message_id="m-1")
    first, second = await collect(client.send_message(sent)), await collect(client.send_message(sent))
    assert first.task_id == second.task_id
    assert first.artifacts == second.artifacts


async def test_an_answer_sent_twice_is_given_once(client):
    """An answer that is repeated after the task is over gets the finished task, and nothing is paid twice."""
    asked = await collect(client.send_message(message("conformance: approval")))
    answer = message("approve pay-a", task_id=asked.task_id)
    await collect(client.send_message(answer))
    again = await collect(client.send_message(answer))
    assert again.states == ["COMPLETED"]
    assert list(again.artifacts.values()) == ["One moment. ", "Done: paid 5 to a."]


async def test_a_message_id_of_another_message_is_refused(client):
    """The same id for another text is a mistake that is named, and not the old answer."""
    await collect(client.send_message(message("conformance: text", message_id="m-1")))
    with pytest.raises(InvalidParamsError, match="message_id"):
        await collect(client.send_message(message("conformance: tool", message_id="m-1")))


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_blocking_call_returns_the_task_where_it_ends_or_waits(served_claw, binding):
    """Without streaming the whole task comes back, finished or input-required."""
    client = served_claw.client(binding, streaming=False)
    done = await collect(client.send_message(message("conformance: text")))
    assert (done.states, done.text) == (["COMPLETED"], "Hello 你好 🙂")
    asked = await collect(client.send_message(message("conformance: approval")))
    assert asked.states == ["INPUT_REQUIRED"]


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_call_that_does_not_wait_returns_at_once_and_the_task_goes_on(served_claw, binding):
    """The task is there to be fetched, subscribed to, and cancelled."""
    client = served_claw.client(binding, streaming=False)
    begun = await collect(client.send_message(message("conformance: slow", now=True)))
    assert begun.states[0] in ("SUBMITTED", "WORKING")
    task = await client.cancel_task(CancelTaskRequest(id=begun.task_id))
    assert task.status.state == TASK_STATE_CANCELED


async def test_cancel_ends_a_running_task_and_its_stream(client):
    """The canceller gets the cancelled task, and who follows it sees it end cancelled, with the text so far."""
    stream = client.send_message(message("conformance: slow"))
    begun = asyncio.Event()

    def note(seen) -> bool:
        if seen.artifacts:
            begun.set()
        return False

    following = asyncio.create_task(collect(stream, note))
    await asyncio.wait_for(begun.wait(), 60)
    page = await client.list_tasks(ListTasksRequest(status=TASK_STATE_WORKING))
    task = await client.cancel_task(CancelTaskRequest(id=page.tasks[0].id))
    seen = await following
    assert task.status.state == TASK_STATE_CANCELED
    assert seen.states[-1] == "CANCELED"
    assert task.artifacts[0].parts[0].text == seen.text
    assert seen.text.startswith("000 ")


async def test_cancel_ends_a_waiting_task_and_no_second_time(client):
    """A task that waits is cancelled at once; one that is over cannot be."""
    asked = await collect(client.send_message(message("conformance: approval")))
    task = await client.cancel_task(CancelTaskRequest(id=asked.task_id))
    assert task.status.state == TASK_STATE_CANCELED
    with pytest.raises(TaskNotCancelableError):
        await client.cancel_task(CancelTaskRequest(id=asked.task_id))
    with pytest.raises(UnsupportedOperationError):
        await collect(client.send_message(message("approve pay-a", task_id=asked.task_id)))


async def test_subscribing_after_a_lost_stream_loses_and_doubles_nothing(client):
    """Task first with the text so far, then only what comes behind it, to the end."""
    part = await collect(client.send_message(message("conformance: slow")), lambda seen: "003 " in seen.text)
    ending = []

    def end(seen) -> bool:
        if seen.kinds[-1] == "artifact_update" and not ending:
            ending.append(asyncio.create_task(client.cancel_task(CancelTaskRequest(id=part.task_id))))
        return False

    seen = await collect(client.subscribe(SubscribeToTaskRequest(id=part.task_id)), end)
    cancelled = await ending[0]
    numbers = "".join(f"{number:03} " for number in range(200))
    assert seen.kinds[0] == "task"
    assert seen.first.artifacts[0].parts[0].text.startswith(part.text)
    assert len(seen.first.artifacts[0].parts[0].text) < len(seen.text)
    assert numbers.startswith(seen.text)
    assert cancelled.artifacts[0].parts[0].text == seen.text
    assert seen.states[-1] == "CANCELED"


async def test_a_subscriber_stays_over_a_question_to_the_end(client):
    """Two streams of one task: the one that only watches sees the question, the answer's effect and the end."""
    asked = await collect(client.send_message(message("conformance: approval")))
    begun = asyncio.Event()

    def note(seen) -> bool:
        begun.set()
        return False

    watching = asyncio.create_task(collect(client.subscribe(SubscribeToTaskRequest(id=asked.task_id)), note))
    await asyncio.wait_for(begun.wait(), 60)
    answered = await collect(client.send_message(message("approve pay-a", task_id=asked.task_id)))
    watched = await watching
    assert watched.states[0] == "INPUT_REQUIRED"
    assert watched.states[-1] == "COMPLETED"
    assert watched.artifacts == answered.artifacts
    with pytest.raises(UnsupportedOperationError):
        await collect(client.subscribe(SubscribeToTaskRequest(id=asked.task_id)))


async def test_a_task_is_told_whole_whenever_it_is_asked_for(client):
    """Get and list fold it from the engine's log; lists leave artifacts out unless they are wanted."""
    seen = await collect(client.send_message(message("conformance: text")))
    task = await client.get_task(GetTaskRequest(id=seen.task_id))
    assert task.status.state == TASK_STATE_COMPLETED
    assert [a.parts[0].text for a in task.artifacts] == ["Hello 你好 🙂"]
    bare = await client.list_tasks(ListTasksRequest(context_id=task.context_id))
    whole = await client.list_tasks(ListTasksRequest(context_id=task.context_id, include_artifacts=True))
    assert not bare.tasks[0].artifacts
    assert whole.tasks[0].artifacts == task.artifacts
    assert not (await client.list_tasks(ListTasksRequest(status=TASK_STATE_WORKING))).tasks


async def test_lists_come_in_pages(client):
    """Every task comes once, and the last page says that it is the last."""
    for _ in range(3):
        await collect(client.send_message(message("conformance: text")))
    first = await client.list_tasks(ListTasksRequest(page_size=2))
    assert first.total_size == 3
    rest = await client.list_tasks(ListTasksRequest(page_size=2, page_token=first.next_page_token))
    assert len({task.id for task in [*first.tasks, *rest.tasks]}) == 3
    assert rest.next_page_token == ""


async def test_mistakes_are_named(client):
    """What does not exist or does not fit is an error of A2A's own, with words that help."""
    with pytest.raises(TaskNotFoundError):
        await client.get_task(GetTaskRequest(id="nothing"))
    with pytest.raises(TaskNotFoundError):
        await collect(client.send_message(message("hi", task_id="nothing")))
    with pytest.raises(InvalidParamsError, match="context"):
        await collect(client.send_message(message("hi", context_id="nothing")))
    with pytest.raises(PushNotificationNotSupportedError):
        await client.create_task_push_notification_config(TaskPushNotificationConfig(task_id="t", url="https://x.test"))
    asked = await collect(client.send_message(message("conformance: approval")))
    with pytest.raises(InvalidParamsError, match="context"):
        await collect(client.send_message(message("approve pay-a", task_id=asked.task_id, context_id="other")))
    images = message("conformance: text")
    images.configuration.CopyFrom(SendMessageConfiguration(accepted_output_modes=["image/png"]))
    with pytest.raises(ContentTypeNotSupportedError, match="text/plain"):
        await collect(client.send_message(images))
    with pytest.raises(InvalidParamsError):
        await client.list_tasks(ListTasksRequest(page_size=101))


async def test_a_running_task_takes_no_message(client):
    """Who talks to a task that asked nothing is told so, and nothing is started."""
    begun = await collect(client.send_message(message("conformance: slow")), lambda seen: bool(seen.artifacts))
    with pytest.raises(UnsupportedOperationError, match="waits for no message"):
        await collect(client.send_message(message("faster", task_id=begun.task_id)))
    await client.cancel_task(CancelTaskRequest(id=begun.task_id))


async def test_data_goes_to_the_agent_as_json(client):
    """A data part is text for the model; the scenario's name is found in the words beside it."""
    seen = await collect(client.send_message(message("conformance: text", parts=[data_part({"a": [1, "你"]})])))
    assert seen.states[-1] == "COMPLETED"
    with pytest.raises((InvalidParamsError, A2AClientError)):
        await collect(client.send_message(message(parts=[Part(url="ftp://x.test/a", media_type="image/png")])))


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_agent_is_the_one_the_caller_names(served_claw, binding):
    """The tenant of an interface names the agent; one that is not there is a mistake that is named."""
    seen = await collect(served_claw.client(binding, tenant="conformance").send_message(message("conformance: text")))
    assert seen.states[-1] == "COMPLETED"
    with pytest.raises(InvalidParamsError, match="nobody"):
        await collect(served_claw.client(binding, tenant="nobody").send_message(message("conformance: text")))


async def test_a_message_in_a_busy_context_waits_in_line_as_a_task_of_its_own(client):
    """It is submitted at once, and its turn comes when the task before it is over."""
    begun = await collect(client.send_message(message("conformance: slow")), lambda seen: bool(seen.artifacts))
    second = client.send_message(message("conformance: text", context_id=begun.first.context_id))
    waiting = (await anext(second)).task
    assert waiting.id != begun.task_id
    assert waiting.status.state == TASK_STATE_SUBMITTED
    await client.cancel_task(CancelTaskRequest(id=begun.task_id))
    seen = await collect(second)
    assert (seen.states[-1], seen.text) == ("COMPLETED", "Hello 你好 🙂")


async def test_a_task_that_ends_while_it_is_looked_at_is_told_to_its_end(fake_engine):
    """The log may have grown beyond what the run said of itself a moment ago: nothing is lost by it."""
    end = make_done(message_id="m", conversation_id="c", content="all", stop_reason="finished", seq=2)
    events = [make_delta("all", seq=1), end]
    fake_engine.on("Run", [events])
    fake_engine.on("Attach", [events])
    fake_engine.runs[fake_engine.run_id] = Run(
        id=fake_engine.run_id, conversation_id="c", state=RunState.RUN_STATE_RUNNING, last_seq=1
    )
    async with opened(fake_engine.target) as claw:
        for binding in BINDINGS:
            seen = await collect(claw.client(binding).send_message(message("hi", context_id="c")))
            assert (seen.states[-1], seen.text) == ("COMPLETED", "all")
