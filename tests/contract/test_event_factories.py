"""The factories: what they make, what they refuse, and how events and diagnoses read as text."""

from collections.abc import Callable, Mapping

import pytest
from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp

from dualclaw import Diagnosis, EngineEvent, InterruptItem, Node, Severity
from dualclaw.events import (
    diagnosis_from_dict,
    diagnosis_text,
    diagnosis_to_dict,
    make_delta,
    make_diagnosis,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
    to_text,
)

BAD = make_diagnosis(
    code="tool.failed", severity="error", summary="坏了", detail="at line 3", hint="重试", retryable=True
)
BAD_DICT = {
    "code": "tool.failed",
    "severity": "error",
    "summary": "坏了",
    "detail": "at line 3",
    "hint": "重试",
    "retryable": True,
}


def test_error_diagnosis_fills_an_empty_result() -> None:
    """Front-ends take an empty result for "still running", so a failed step always has one."""
    failed = make_step("skill", phase="fail", diagnosis=BAD)
    assert failed.step.step.result == "❌ 坏了\nat line 3\n建议：重试"
    assert make_step("skill", result="r", diagnosis=BAD).step.step.result == "r"
    warning = make_diagnosis(code="loop.warned", severity="warning", summary="s")
    assert make_step("skill", diagnosis=warning).step.step.result == ""


def test_arguments_are_canonical() -> None:
    """What the factory stores is the text that other languages copy verbatim."""
    args = {"城市": "北京", "n": 2**70, "f": 1e16, "x": float("nan"), "s": "\ud800\ud83c\udf78", "t": (1, None)}
    event = make_step("skill", args=args)
    assert event.step.step.args_json == (
        '{"城市": "北京", "n": 1180591620717411303424, "f": 1e+16, "x": null, "s": "\ufffd🍸", "t": [1, null]}'
    )
    assert make_step("skill", args={}).step.step.args_json == ""


def test_arguments_deeper_than_readers_accept_are_left_out() -> None:
    """What a reader takes for {} is stored as {}, or verbatim copies would differ from parsed ones."""

    def nested(levels: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for _ in range(levels - 1):
            found = {"a": found}
        return found

    assert make_step("skill", args=nested(100)).step.step.args_json != ""
    assert make_step("skill", args=nested(101)).step.step.args_json == ""
    assert make_step("skill", args=nested(50_000)).step.step.args_json == ""


def test_bad_text_is_cleaned_wherever_it_enters() -> None:
    """Lone surrogates become U+FFFD and pairs one character, in every text of every factory."""
    assert make_delta("a\ud800").delta.content == "a\ufffd"
    assert make_delta("\ud83c\udf78").delta.content == "🍸"
    bad = "\udfff"
    events = [
        make_reasoning(bad, trace_id=bad),
        make_step("mcp", name=bad, text=bad, server=bad, result=bad, call_id=bad, node={"id": bad, "label": bad}),
        make_step("skill", diagnosis={"code": bad, "severity": "info", "summary": bad}),
        make_done(message_id=bad, conversation_id=bad, content=bad, used_skills=[bad], used_mcp=[bad]),
        make_error(bad, diagnosis=make_diagnosis(code=bad, severity="error", summary=bad, detail=bad, hint=bad)),
        make_interrupt([{"id": bad, "kind": "question", "prompt": bad, "path": [bad]}]),
        make_rewind(bad, reasoning=bad, reason=bad),
    ]
    for event in events:
        assert "\ufffd" in str(json_format.MessageToDict(event))


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: make_delta(None), "content must be a str, not NoneType"),  # type: ignore[arg-type]
    (lambda: make_delta(b"a"), "content must be a str, not bytes"),  # type: ignore[arg-type]
    (lambda: make_reasoning(3), "content must be a str, not int"),  # type: ignore[arg-type]
    (lambda: make_delta("a", seq="1"), "seq must be an int, not str"),  # type: ignore[arg-type]
    (lambda: make_delta("a", seq=True), "seq must be an int, not bool"),
    (lambda: make_delta("a", seq=-1), "seq must be between 0 and 2147483647"),
    (lambda: make_delta("a", seq=2**31), "seq must be between 0 and 2147483647"),
    (lambda: make_delta("a", run_id=7), "run_id must be a str, not int"),  # type: ignore[arg-type]
    (lambda: make_step("dance"), "kind must be one of thinking, skill, mcp, agent, kb, media, not 'dance'"),
    (lambda: make_step("unspecified"), "kind must be one of"),
    (lambda: make_step("SKILL"), "kind must be one of"),
    (lambda: make_step(2), "kind must be a str, not int"),  # type: ignore[arg-type]
    (lambda: make_step("skill", phase="paused"), "phase must be one of start, ok, fail, not 'paused'"),
    (lambda: make_step("skill", phase=1), "phase must be a str, not int"),  # type: ignore[arg-type]
    (lambda: make_step("skill", index=-1), "index must be between"),
    (lambda: make_step("skill", index=1.0), "index must be an int, not float"),  # type: ignore[arg-type]
    (lambda: make_step("skill", index=False), "index must be an int, not bool"),
    (lambda: make_step("skill", name=None), "name must be a str, not NoneType"),  # type: ignore[arg-type]
    (lambda: make_step("skill", args='{"a": 1}'), "args must be a dict, not str"),  # type: ignore[arg-type]
    (lambda: make_step("skill", args=[1]), "args must be a dict, not list"),  # type: ignore[arg-type]
    (lambda: make_step("skill", args={"a": {1}}), "args: a value of type set has no JSON form"),
    (lambda: make_step("skill", args={(1,): 1}), "args: a key of type tuple has no JSON form"),  # type: ignore[dict-item]
    (lambda: make_step("skill", node="n"), "node must be a Node or a dict, not str"),  # type: ignore[arg-type]
    (lambda: make_step("skill", node={"id": 1}), "node.id must be a str, not int"),
    (lambda: make_step("skill", node={"name": "n"}), "node has no key 'name'"),
    (lambda: make_step("skill", diagnosis="bad"), "diagnosis must be a Diagnosis or a dict, not str"),  # type: ignore[arg-type]
    (lambda: make_step("skill", diagnosis={"severity": "fatal"}), "diagnosis.severity must be one of info, warning"),
    (lambda: make_step("skill", diagnosis={"code": 5}), "diagnosis.code must be a str, not int"),
    (lambda: make_step("skill", diagnosis={"retryable": 1}), "diagnosis.retryable must be a bool, not int"),
    (lambda: make_error("m", diagnosis=Node()), "diagnosis must be a Diagnosis or a dict, not Node"),  # type: ignore[arg-type]
    (lambda: make_error(None), "message must be a str, not NoneType"),  # type: ignore[arg-type]
    (lambda: make_done(message_id=1, conversation_id=""), "message_id must be a str, not int"),  # type: ignore[arg-type]
    (lambda: make_done(message_id="", conversation_id="", generating=1), "generating must be a bool, not int"),  # type: ignore[arg-type]
    (lambda: make_done(message_id="", conversation_id="", used_skills="a"), "used_skills must be a list, not str"),
    (lambda: make_done(message_id="", conversation_id="", used_mcp=[1]), "used_mcp must be a str, not int"),  # type: ignore[list-item]
    (lambda: make_done(message_id="", conversation_id="", process_steps=[1]), "process_steps must be a list of Step"),  # type: ignore[list-item]
    (
        lambda: make_done(message_id="", conversation_id="", process_steps=[{"type": "x"}]),
        "process_steps: a step's type",
    ),
    (lambda: make_done(message_id="", conversation_id="", usage={}), "usage must be a Usage, not dict"),  # type: ignore[arg-type]
    (lambda: make_done(message_id="", conversation_id="", stop_reason="tired"), "stop_reason must be one of finished,"),
    (lambda: make_interrupt(None), "items must be a list, not NoneType"),  # type: ignore[arg-type]
    (lambda: make_interrupt({"id": "i"}), "items must be a list, not dict"),  # type: ignore[arg-type]
    (lambda: make_interrupt(["i"]), "items must be a list of InterruptItem or dict, not str"),  # type: ignore[list-item]
    (lambda: make_interrupt([{"id": "i"}]), "items.kind must be one of approval, question, not ''"),
    (lambda: make_interrupt([{"kind": "approval", "args_json": "{}"}]), "items has no key 'args_json'"),
    (lambda: make_interrupt([{"kind": "approval", "allowed_actions": ["dance"]}]), "items.allowed_actions must be one"),
    (lambda: make_interrupt([{"kind": "approval", "args": []}]), "items.args must be a dict, not list"),
    (lambda: make_interrupt([{"kind": "approval", "expire_time": "soon"}]), "items.expire_time must be an RFC 3339"),
    (
        lambda: make_interrupt([{"kind": "approval", "expire_time": 5}]),
        "items.expire_time must be a Timestamp or an RFC",
    ),
    (lambda: make_rewind("a", attempt=-1), "attempt must be between"),
    (lambda: make_rewind("a", reason=4), "reason must be a str, not int"),  # type: ignore[arg-type]
    (
        lambda: make_diagnosis(code="c", severity="", summary="s"),
        "severity must be one of info, warning, error, not ''",
    ),
    (lambda: make_diagnosis(code="c", severity=3, summary="s"), "severity must be a str, not int"),  # type: ignore[arg-type]
    (lambda: make_diagnosis(code=None, severity="info", summary="s"), "code must be a str, not NoneType"),  # type: ignore[arg-type]
    (lambda: make_diagnosis(code="c", severity="info", summary="s", retryable=0), "retryable must be a bool, not int"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "text"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_value_is_refused_with_its_name(make: Callable[[], object], text: str) -> None:
    """Nothing a reader could not read is made, and the error says which value it was."""
    with pytest.raises(ValueError, match="^" + text.replace("(", r"\(")):
        make()


def test_unknown_envelope_key_is_refused() -> None:
    """A misspelt keyword is an error as for any Python function."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'trace'"):
        make_delta("a", trace="t")  # type: ignore[call-arg]


def test_factories_take_messages_and_dicts_alike() -> None:
    """Node, diagnosis, steps and questions may be given in either form, with the same result."""
    node = Node(id="i", type="tool", label="l")
    as_dict: Mapping[str, object] = {"id": "i", "type": "tool", "label": "l"}
    assert make_step("skill", node=node) == make_step("skill", node=as_dict)
    assert make_step("skill", diagnosis=BAD) == make_step("skill", diagnosis=BAD_DICT)
    step = make_step("mcp", server="s", name="n", args={"a": 1}, result="r", phase="ok").step.step
    wire = {"type": "mcp", "server": "s", "name": "n", "args": {"a": 1}, "result": "r", "phase": "ok"}
    assert make_done(message_id="", conversation_id="", process_steps=[step]) == make_done(
        message_id="", conversation_id="", process_steps=[wire]
    )
    item = InterruptItem(
        id="i",
        kind=1,
        tool_name="t",
        args_json='{"a": 1}',
        prompt="p",
        allowed_actions=[1, 5],
        response_schema_json='{"type": "string"}',
        path=["r"],
        args_hash="h",
        expire_time=Timestamp(seconds=1),
    )
    fields = {
        "id": "i",
        "kind": "approval",
        "tool_name": "t",
        "args": {"a": 1},
        "prompt": "p",
        "allowed_actions": ["approve", "respond"],
        "response_schema": {"type": "string"},
        "path": ["r"],
        "args_hash": "h",
    }
    expected = make_interrupt([item])
    assert make_interrupt([{**fields, "expire_time": "1970-01-01T00:00:01Z"}]) == expected
    assert make_interrupt([{**fields, "expire_time": Timestamp(seconds=1)}]) == expected


def test_made_events_do_not_share_what_they_were_given() -> None:
    """A message given to a factory may be changed afterwards without changing the event."""
    node, args = Node(id="i"), {"a": [1]}
    event = make_step("skill", node=node, args=args)
    node.id, args["a"] = "j", []
    assert event.step.step.node.id == "i"
    assert event.step.step.args_json == '{"a": [1]}'


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (make_delta("你好"), "你好"),
        (make_reasoning("想"), "想"),
        (make_rewind("a", reasoning="b"), "a"),
        (make_step("skill", name="n", result="r", phase="ok"), ""),
        (make_step("skill", diagnosis=make_diagnosis(code="c", severity="info", summary="s")), ""),
        (
            make_step("skill", diagnosis=make_diagnosis(code="c", severity="warning", summary="s", hint="h")),
            "⚠️ s\n建议：h",
        ),
        (make_step("skill", diagnosis=BAD), "❌ 坏了\nat line 3\n建议：重试"),
        (make_done(message_id="m", conversation_id="c", content="a"), "a"),
        (make_error("坏了"), "❌ 坏了"),
        (make_error("m", diagnosis=BAD), "❌ 坏了\nat line 3\n建议：重试"),
        (make_interrupt([]), ""),
        (
            make_interrupt(
                [
                    {"id": "i", "kind": "approval", "tool_name": "send", "prompt": "Send\nit?"},
                    {"id": "j", "kind": "approval", "tool_name": "send"},
                    {"id": "k", "kind": "question"},
                ]
            ),
            "Send it?\nsend\nk",
        ),
    ],
)
def test_text_for_channels_without_structure(event: EngineEvent, text: str) -> None:
    """What an instant messenger shows of an event."""
    assert to_text(event) == text


@pytest.mark.parametrize(
    ("diagnosis", "text"),
    [
        (Diagnosis(severity=Severity.SEVERITY_INFO, summary="s"), "ℹ️ s"),
        (Diagnosis(severity=Severity.SEVERITY_WARNING, summary="s", detail="d"), "⚠️ s\nd"),
        (Diagnosis(severity=Severity.SEVERITY_ERROR, summary="s", hint="h"), "❌ s\n建议：h"),
        (
            Diagnosis(severity=Severity.SEVERITY_ERROR, summary="one\ntwo", detail="three\nfour"),
            "❌ one two\nthree\nfour",
        ),
        (Diagnosis(severity=Severity.SEVERITY_ERROR, code="tool.failed"), "❌ tool.failed"),
        (Diagnosis(severity=Severity.SEVERITY_ERROR), "❌"),
        (Diagnosis(summary="s"), "ℹ️ s"),
        (Diagnosis(), ""),
    ],
)
def test_text_of_a_diagnosis(diagnosis: Diagnosis, text: str) -> None:
    """Icon and summary on one line, then detail, then the hint, each only when there is one."""
    assert diagnosis_text(diagnosis) == text
    assert diagnosis_text(diagnosis_to_dict(diagnosis)) == text


def test_diagnosis_and_dict_are_the_same_thing() -> None:
    """All six keys are always there, and lead back to the message."""
    assert diagnosis_to_dict(BAD) == BAD_DICT
    assert list(diagnosis_to_dict(Diagnosis())) == ["code", "severity", "summary", "detail", "hint", "retryable"]
    assert diagnosis_from_dict(BAD_DICT) == BAD
    assert diagnosis_from_dict({"severity": "fatal", "code": 3, "x": 1}) == Diagnosis()
    assert diagnosis_from_dict(None) == Diagnosis()
