"""EngineError and its reasons."""

from typing import get_args

import pytest

from dualclaw import ErrorReason
from dualclaw.errors import REASONS, EngineError, FieldError, Reason, diagnosis_code


def test_reasons_are_those_of_the_schema() -> None:
    """The literal names every value of the enum, in its order, and no other."""
    names = [value.name.removeprefix("ERROR_REASON_") for value in ErrorReason.DESCRIPTOR.values]
    assert ["UNSPECIFIED", *get_args(Reason)] == names
    assert frozenset(names[1:]) == REASONS


def test_error_speaks_for_people_and_programs() -> None:
    """Reason, message and metadata are kept; the message is the exception's text."""
    error = EngineError("UNKNOWN_RUN", "no run r1", {"run_id": "r1"}, retry_after=1.5)
    assert (error.reason, error.message, str(error), error.retry_after) == (
        "UNKNOWN_RUN",
        "no run r1",
        "no run r1",
        1.5,
    )
    assert dict(error.metadata) == {"run_id": "r1"}
    assert repr(error) == "EngineError(UNKNOWN_RUN: no run r1)"


def test_metadata_is_a_copy_that_cannot_change() -> None:
    """What the raiser does to its dict later does not reach the error, and nobody else can write to it."""
    given = {"run_id": "r1"}
    error = EngineError("UNKNOWN_RUN", "no run", given)
    given["run_id"] = "r2"
    assert error.metadata["run_id"] == "r1"
    with pytest.raises(TypeError):
        error.metadata["run_id"] = "r3"  # type: ignore[index]
    assert dict(EngineError("INTERNAL", "x").metadata) == {}


def test_what_fails_inside_a_run_has_no_hint_here() -> None:
    """Models and tools say what to do in their own Diagnosis; a general word would stand in its way."""
    assert EngineError("TOOL_FAILED", "x").hint == ""
    assert EngineError("TOOL_FAILED", "x", {"hint": "look"}).hint == "look"


def test_field_error_names_its_fields() -> None:
    """It is INVALID_REQUEST, and its text says field by field what is wrong."""
    error = FieldError({"message.role": "must be USER", "agent": "unknown"})
    assert error.reason == "INVALID_REQUEST"
    assert str(error) == "message.role: must be USER; agent: unknown"
    assert dict(error.fields) == {"message.role": "must be USER", "agent": "unknown"}
    assert isinstance(error, EngineError)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("TOOL_TIMEOUT", "tool.timeout"),
        ("MODEL_STREAM_BROKEN", "model.stream_broken"),
        ("TOOL_BAD_ARGUMENTS", "tool.bad_arguments"),
        ("PERMISSION_DENIED", "permission.denied"),
        ("INTERNAL", "internal"),
    ],
)
def test_code_of_a_diagnosis(reason: Reason, code: str) -> None:
    """Lower case, and the first underscore becomes a dot."""
    assert diagnosis_code(reason) == code
