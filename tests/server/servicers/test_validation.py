from collections.abc import Callable

import pytest

from dualclaw import (
    ContentPart,
    Decision,
    ListRunsRequest,
    Media,
    Message,
    ResumeRequest,
    Role,
    RunRequest,
    RunState,
    ToolCall,
)
from dualclaw.errors import FieldError
from dualclaw_server.servicers import validation


def question(text: str = "hello") -> RunRequest:
    return RunRequest(message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)]))


def faults_of(check: Callable[[], object]) -> set[str]:
    with pytest.raises(FieldError) as caught:
        check()
    return set(caught.value.fields)


def test_a_plain_question_passes_and_is_not_changed() -> None:
    """The accepted request equals the one sent, and is another object."""
    request = question()
    accepted = validation.run_request(request)
    assert accepted == request
    assert accepted is not request


def test_what_only_the_engine_gives_is_not_taken_from_a_caller() -> None:
    """Id, author and time of the message are dropped; the caller's own object keeps them."""
    request = question()
    request.message.id, request.message.author = "m1", "system"
    request.message.create_time.GetCurrentTime()
    assert validation.run_request(request) == question()
    assert request.message.author == "system"


def test_all_violations_are_told_at_once_by_field_path() -> None:
    """One refusal names every wrong field, inside parts and options too."""
    request = RunRequest(
        agent="a\n",
        claw="c" * 65,
        request_id="r" * 257,
        metadata={f"k{n}": "v" for n in range(65)},
        message=Message(
            role=Role.ROLE_ASSISTANT,
            parts=[
                ContentPart(text="fine"),
                ContentPart(text=""),
                ContentPart(tool_call=ToolCall(id="1")),
                ContentPart(),
                ContentPart(image=Media(media_type="image/png", url="file:///etc/passwd")),
                ContentPart(file=Media(media_type="pdf")),
            ],
        ),
    )
    request.options.max_steps = -1
    request.options.retry_mode = 77  # type: ignore[assignment]
    request.on_busy = 9  # type: ignore[assignment]
    assert faults_of(lambda: validation.run_request(request)) == {
        "agent",
        "claw",
        "request_id",
        "metadata",
        "message.role",
        "message.parts[1].text",
        "message.parts[2].tool_call",
        "message.parts[3]",
        "message.parts[4].image.url",
        "message.parts[5].file",
        "message.parts[5].file.media_type",
        "options.max_steps",
        "options.retry_mode",
        "on_busy",
    }


@pytest.mark.parametrize("role", [Role.ROLE_UNSPECIFIED, Role.ROLE_SYSTEM, Role.ROLE_ASSISTANT, Role.ROLE_TOOL, 42])
def test_only_a_user_may_speak(role: Role.ValueType) -> None:
    """No caller can put words into the mouth of the system, the agent or a tool."""
    request = question()
    request.message.role = role
    assert faults_of(lambda: validation.run_request(request)) == {"message.role"}


def test_a_request_without_message_or_parts_is_refused() -> None:
    """There must be a message, and it must have a part."""
    assert faults_of(lambda: validation.run_request(RunRequest())) == {"message"}
    empty = RunRequest(message=Message(role=Role.ROLE_USER))
    assert faults_of(lambda: validation.run_request(empty)) == {"message.parts"}


@pytest.mark.parametrize(
    ("field", "limit"), [("claw", 64), ("request_id", 256), ("conversation_id", 128), ("agent", 256)]
)
def test_limits_count_bytes_and_not_characters(field: str, limit: int) -> None:
    """Exactly the limit passes, one more does not, and a character of three bytes counts three."""
    request = question()
    setattr(request, field, "x" * limit)
    validation.run_request(request)
    for text in ("x" * (limit + 1), "字" * (limit // 3 + 1)):
        setattr(request, field, text)
        assert faults_of(lambda: validation.run_request(request)) == {field}


def test_the_text_of_a_message_is_limited_over_all_parts() -> None:
    """Many parts do not get around the limit of one."""
    request = question("x" * validation.MAX_TEXT)
    validation.run_request(request)
    request.message.parts.add(text="y")
    assert faults_of(lambda: validation.run_request(request)) == {"message.parts"}


def test_a_page_has_50_items_unless_asked_and_500_at_most() -> None:
    """0 is 50, above 500 is 500, negative is refused."""
    assert [validation.page(size, "") for size in (0, 1, 500, 501, 2_000_000_000)] == [50, 1, 500, 500, 500]
    assert faults_of(lambda: validation.page(-1, "t" * 2_000)) == {"page_size", "page_token"}


def test_states_nobody_knows_are_refused_by_their_place() -> None:
    """A filter by a state that does not exist would silently find nothing."""
    request = ListRunsRequest(states=[RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_UNSPECIFIED, 99])  # type: ignore[list-item]
    assert faults_of(lambda: validation.list_runs_request(request)) == {"states[1]", "states[2]"}


def test_a_message_of_blanks_is_empty() -> None:
    """Spaces are no question; beside an image, or beside words, they are fine."""
    assert faults_of(lambda: validation.run_request(question(" \n\t "))) == {"message.parts"}
    request = question("hello")
    request.message.parts.add(text=" ")
    validation.run_request(request)


def test_a_request_of_very_many_items_is_refused_at_once() -> None:
    """Past the limit nothing is looked at any more: one refusal, as long as the limit and no longer."""
    request = question()
    request.message.parts.extend([ContentPart()] * 1_000)
    assert len(faults_of(lambda: validation.run_request(request))) <= validation.MAX_PARTS + 1
    states = ListRunsRequest(states=[RunState.RUN_STATE_UNSPECIFIED] * 1_000)
    assert len(faults_of(lambda: validation.list_runs_request(states))) == validation.MAX_PARTS + 1
    answers = ResumeRequest(run_id="r", decisions=[Decision()] * 1_000)
    assert len(faults_of(lambda: validation.resume_request(answers))) == validation.MAX_PARTS + 1
