"""The events of the golden vectors, written by hand as protobuf JSON with proto field names.

``EVENTS``: file -> name -> event. ``ODD_ARGS`` holds args_json texts that are not canonical, each with what a
reader makes of it, because a generator that worked it out would be a second copy of what it tests.
"""

from typing import Any

Event = dict[str, Any]

TRACE = "0af7651916cd43dd8448eb211c80319c"
RUN = "01890a5d-ac96-774b-bcce-b302099a8057"
META = {"trace_id": TRACE, "tenant_id": "acme", "claw": "web", "run_id": RUN}


def step(kind: object, **fields: object) -> Event:
    """A step event without index."""
    return {"step": {"step": {"kind": kind, **fields}}}


def diagnosis(severity: object, **fields: object) -> Event:
    """A diagnosis with all of its keys."""
    full = {
        "code": "tool.timeout",
        "severity": severity,
        "summary": "The search took longer than 60 s.",
        "detail": "GET https://example.com/search\ntimed out",
        "hint": "Try a narrower query.",
        "retryable": True,
    }
    return {**full, **fields}


def args(text: str) -> Event:
    """A finished MCP step with these arguments."""
    return step("STEP_KIND_MCP", server="files", name="read", args_json=text, result="ok", phase="PHASE_OK")


ODD_TEXTS = {
    "empty": "",
    "ascii": "Hello, world",
    "chinese": "你好",
    "emoji": "🍸 👩‍👩‍👧 🇨🇳",
    "quotes_and_backslash": 'say "hi" \\ / \\n',
    "controls": "\x00\x01\b\t\n\x0b\f\r\x1f\x7f",
    "line_separators": "a\u2028b\u2029c\u0085d",
    "combining": "e\u0301 \u200d \ufeff \ufffd",
    "outside_bmp": "𝕏 𠮷 \U0010ffff",
    "noncharacters": "\uffff\ufdd0\ue000",
    "markup": "</script><img src=x onerror=alert(1)>&amp;",
    "looks_like_a_frame": "\n\ndata: {}\n\n",
}

ARGS = {
    "empty": "",
    "empty_object": "{}",
    "flat": '{"path": "/tmp/a.txt", "line": 3, "all": true, "none": null}',
    "nested": '{"a": {"b": [1, [2, {"c": []}], {}]}, "d": {}}',
    "key_order_kept": '{"z": 1, "a": 2, "10": 3, "9": 4, "1": 5}',
    "big_integers": '{"id": 9007199254740993, "u64": 18446744073709551615, "neg": -9223372036854775809, "huge": '
    + "1234567890" * 10
    + "}",
    "floats": '{"a": 1e+16, "b": 1e-07, "c": 1.0, "d": 0.1, "e": -0.0, "f": 1.7976931348623157e+308, "g": 5e-324, '
    '"h": 1e+22, "i": 123456789012345.6, "j": 0.0001}',
    "chinese_and_emoji": '{"城市": "北京", "🍸": "🍸"}',
    "escapes": '{"k\\"\\\\": "\\u0000\\u0001\\b\\t\\n\\u000b\\f\\r\\u001f\x7f/"}',
    "line_separators": '{"a": "\u2028\u2029\u0085"}',
    "empty_key": '{"": ""}',
    "proto_key": '{"__proto__": {"x": 1}, "constructor": 2}',
    "depth_100": '{"a": ' * 99 + "{}" + "}" * 99,
    "brackets_in_strings": '{"a": "' + "[{" * 200 + '"}',
}

# What follows is not canonical, so only its reading is pinned.
ODD_ARGS: dict[str, tuple[str, str]] = {
    "not_json": ("{'a': 1}", "{}"),
    "cut_off": ('{"a": "b', "{}"),
    "two_objects": ("{} {}", "{}"),
    "a_list": ("[1, 2]", "{}"),
    "a_string": ('"x"', "{}"),
    "null": ("null", "{}"),
    "raw_newline_in_string": ('{"a": "x\ny"}', "{}"),
    "depth_101": ('{"a": ' * 100 + "{}" + "}" * 100, "{}"),
    "depth_101_of_lists": ('{"a": ' + "[" * 100 + "]" * 100 + "}", "{}"),
    "depth_2000": ('{"a": ' * 2_000 + "1" + "}" * 2_000, "{}"),
    "duplicate_keys": ('{"a": 1, "b": 2, "a": 3}', '{"a": 3, "b": 2}'),
    "compact": ('{"a":[1,2],"b":{"c":null}}', '{"a": [1, 2], "b": {"c": null}}'),
    "spaces_around": (' \n\t{"a": 1}\r\n', '{"a": 1}'),
    "escaped_unicode": ('{"a": "\\u4f60\\u597d \\ud83c\\udf78"}', '{"a": "你好 🍸"}'),
    "escaped_lone_surrogate": ('{"a": "\\ud83c", "\\udf78": 1}', '{"a": "\ufffd", "\ufffd": 1}'),
    "nan_and_infinity": ('{"a": NaN, "b": Infinity, "c": -Infinity}', '{"a": null, "b": null, "c": null}'),
    "beyond_a_double": ('{"a": 1e400, "b": -1e400, "c": 1e-400}', '{"a": null, "b": null, "c": 0.0}'),
    "digits_4000": ('{"a": ' + "9" * 4000 + "}", '{"a": ' + "9" * 4000 + "}"),
    "digits_4000_negative": ('{"a": -' + "9" * 4000 + "}", '{"a": -' + "9" * 4000 + "}"),
    "digits_4001": ('{"a": ' + "9" * 4001 + ', "b": 1}', '{"a": null, "b": 1}'),
    "digits_4001_fraction": ('{"a": 0.' + "1" * 4000 + "}", '{"a": null}'),
    "other_floats": ('{"a": 1E5, "b": 100000000000000000.0, "c": 1.10}', '{"a": 100000.0, "b": 1e+17, "c": 1.1}'),
    "minus_zero": ('{"a": -0, "b": -0.0}', '{"a": 0, "b": -0.0}'),
}

ALL_STEPS = [
    {"kind": "STEP_KIND_THINKING", "text": "I should search."},
    {
        "kind": "STEP_KIND_SKILL",
        "name": "weather",
        "args_json": '{"city": "北京"}',
        "result": "晴",
        "phase": "PHASE_OK",
    },
    {"kind": "STEP_KIND_MCP", "server": "files", "name": "read", "result": "text", "phase": "PHASE_OK"},
    {"kind": "STEP_KIND_AGENT", "name": "researcher", "result": "found", "phase": "PHASE_OK", "call_id": "c1"},
    {"kind": "STEP_KIND_KB", "name": "handbook", "result": "p. 3", "phase": "PHASE_OK", "parent_call_id": "c1"},
    {"kind": "STEP_KIND_MEDIA", "name": "paint", "phase": "PHASE_FAIL", "diagnosis": diagnosis("SEVERITY_ERROR")},
]

APPROVAL = {
    "id": "call_7",
    "kind": "INTERRUPT_KIND_APPROVAL",
    "tool_name": "send_mail",
    "args_json": '{"to": "a@example.com", "n": 12345678901234567890}',
    "prompt": "Send this mail?",
    "allowed_actions": ["DECISION_ACTION_APPROVE", "DECISION_ACTION_REJECT", "DECISION_ACTION_EDIT"],
    "path": ["assistant", "send_mail"],
    "args_hash": "9f86d081884c7d65",
    "expire_time": "2026-01-02T03:04:05.250Z",
}
QUESTION = {
    "id": "q1",
    "kind": "INTERRUPT_KIND_QUESTION",
    "prompt": "Which city?\n北京 or 上海",
    "allowed_actions": ["DECISION_ACTION_RESPOND", "DECISION_ACTION_SKIP"],
    "response_schema_json": '{"type": "object", "properties": {"city": {"type": "string"}}}',
}

KIND_FIELDS = {"name": "n", "args_json": '{"q": 1}', "result": "r"}

EVENTS: dict[str, dict[str, Event]] = {
    "delta": {name: {"delta": {"content": text}} for name, text in ODD_TEXTS.items()},
    "reasoning": {name: {"reasoning": {"content": text}} for name, text in ODD_TEXTS.items()},
    "step": {
        "thinking": step("STEP_KIND_THINKING", text="I should search."),
        "thinking_empty": step("STEP_KIND_THINKING"),
        "thinking_hides_other_fields": step("STEP_KIND_THINKING", text="t", name="n", server="s", result="r"),
        "skill": step("STEP_KIND_SKILL", **KIND_FIELDS),
        "mcp": step("STEP_KIND_MCP", server="s", **KIND_FIELDS),
        "agent": step("STEP_KIND_AGENT", **KIND_FIELDS),
        "kb": step("STEP_KIND_KB", **KIND_FIELDS),
        "media": step("STEP_KIND_MEDIA", **KIND_FIELDS),
        "skill_hides_server_and_text": step("STEP_KIND_SKILL", server="s", text="t", **KIND_FIELDS),
        "mcp_empty": step("STEP_KIND_MCP"),
        "skill_empty": step("STEP_KIND_SKILL"),
        "kind_unspecified": step("STEP_KIND_UNSPECIFIED", name="n"),
        "kind_unknown": step(99, name="n"),
        "without_step": {"step": {"index": 3}},
        "index_0": {"step": {"step": {"kind": "STEP_KIND_SKILL", "name": "n"}, "index": 0}},
        "index_7": {"step": {"step": {"kind": "STEP_KIND_SKILL", "name": "n"}, "index": 7}},
        "index_max": {"step": {"step": {"kind": "STEP_KIND_SKILL", "name": "n"}, "index": 2147483647}},
        "index_negative": {"step": {"step": {"kind": "STEP_KIND_SKILL", "name": "n"}, "index": -1}},
        "phase_start": step("STEP_KIND_SKILL", name="n", phase="PHASE_START"),
        "phase_ok": step("STEP_KIND_SKILL", name="n", phase="PHASE_OK", result="r"),
        "phase_fail": step("STEP_KIND_SKILL", name="n", phase="PHASE_FAIL", result="r"),
        "phase_unknown": step("STEP_KIND_SKILL", name="n", phase=9),
        "diagnosis_info": step("STEP_KIND_SKILL", name="n", diagnosis=diagnosis("SEVERITY_INFO")),
        "diagnosis_warning": step("STEP_KIND_SKILL", name="n", diagnosis=diagnosis("SEVERITY_WARNING")),
        "diagnosis_error": step("STEP_KIND_SKILL", name="n", diagnosis=diagnosis("SEVERITY_ERROR")),
        "diagnosis_severity_unspecified": step("STEP_KIND_SKILL", name="n", diagnosis={"code": "c", "summary": "s"}),
        "diagnosis_severity_unknown": step("STEP_KIND_SKILL", name="n", diagnosis=diagnosis(42)),
        "diagnosis_only_severity": step("STEP_KIND_SKILL", name="n", diagnosis={"severity": "SEVERITY_ERROR"}),
        "diagnosis_only_code": step(
            "STEP_KIND_SKILL", diagnosis={"severity": "SEVERITY_WARNING", "code": "loop.warned"}
        ),
        "diagnosis_empty": step("STEP_KIND_SKILL", name="n", diagnosis={}),
        "diagnosis_only_unknown_severity": step("STEP_KIND_SKILL", name="n", diagnosis={"severity": 42}),
        "diagnosis_summary_of_two_lines": step(
            "STEP_KIND_SKILL", diagnosis={"severity": "SEVERITY_ERROR", "summary": "one\ntwo", "hint": "重试"}
        ),
        "node": step("STEP_KIND_SKILL", name="n", node={"id": "n1", "type": "tool", "label": "天气"}),
        "node_only_label": step("STEP_KIND_SKILL", name="n", node={"label": "l"}),
        "node_empty": step("STEP_KIND_SKILL", name="n", node={}),
        "call_ids_stay_inside": step("STEP_KIND_SKILL", name="n", call_id="c2", parent_call_id="c1"),
        "waits_for_approval": {
            "step": {
                "step": {
                    "kind": "STEP_KIND_MCP",
                    "server": "mail",
                    "name": "send",
                    "phase": "PHASE_START",
                    "call_id": "call_7",
                    "diagnosis": {
                        "code": "approval.required",
                        "severity": "SEVERITY_WARNING",
                        "summary": "Send this mail?",
                        "hint": "approve, reject or edit",
                    },
                },
                "index": 2,
            },
        },
        "everything": {
            "step": {
                "step": {
                    "kind": "STEP_KIND_MCP",
                    "server": "s",
                    "text": "t",
                    **KIND_FIELDS,
                    "phase": "PHASE_FAIL",
                    "diagnosis": diagnosis("SEVERITY_ERROR"),
                    "node": {"id": "n1", "type": "tool", "label": "天气"},
                    "call_id": "c2",
                    "parent_call_id": "c1",
                },
                "index": 0,
            },
            "seq": 12,
            **META,
        },
        **{f"text_{name}": step("STEP_KIND_SKILL", name=text, result=text) for name, text in ODD_TEXTS.items()},
    },
    "args": {name: args(text) for name, text in ARGS.items()},
    "args_not_canonical": {name: args(text) for name, (text, _) in ODD_ARGS.items()},
    "done": {
        "empty": {"done": {}},
        "answer": {"done": {"message_id": "m1", "conversation_id": "c1", "content": "你好 🍸\n\u2028"}},
        "generating": {"done": {"message_id": "m1", "conversation_id": "c1", "generating": True}},
        "used": {"done": {"used_skills": ["weather", "天气"], "used_mcp": ["read"]}},
        "steps": {"done": {"message_id": "m1", "conversation_id": "c1", "process_steps": ALL_STEPS}},
        "unknown_steps_left_out": {
            "done": {"process_steps": [{"kind": 99, "name": "x"}, {"name": "y"}, ALL_STEPS[0]]},
        },
        "usage_and_stop_reason_stay_inside": {
            "done": {
                "content": "a",
                "usage": {"input_tokens": 0, "output_tokens": 5},
                "stop_reason": "STOP_REASON_FINISHED",
            },
        },
        "stop_reason_unknown": {"done": {"content": "a", "stop_reason": 77}},
        "everything": {
            "done": {
                "message_id": "m1",
                "conversation_id": "c1",
                "content": "a",
                "process_steps": ALL_STEPS,
                "used_skills": ["weather"],
                "used_mcp": ["read"],
                "generating": True,
                "usage": {"input_tokens": 1, "output_tokens": 2, "reasoning_tokens": 3, "cached_tokens": 4},
                "stop_reason": "STOP_REASON_INTERRUPTED",
            },
            "seq": 99,
            **META,
        },
    },
    "error": {
        "empty": {"error": {}},
        "message": {"error": {"message": "模型不可用"}},
        "diagnosis_info": {"error": {"message": "m", "diagnosis": diagnosis("SEVERITY_INFO")}},
        "diagnosis_warning": {"error": {"message": "m", "diagnosis": diagnosis("SEVERITY_WARNING", detail="")}},
        "diagnosis_error": {
            "error": {"message": "m", "diagnosis": diagnosis("SEVERITY_ERROR", hint="", retryable=False)}
        },
        "diagnosis_empty": {"error": {"message": "m", "diagnosis": {}}},
        "everything": {"error": {"message": "m", "diagnosis": diagnosis("SEVERITY_ERROR")}, "seq": 4, **META},
    },
    "interrupt": {
        "empty": {"interrupt": {}},
        "approval": {"interrupt": {"items": [APPROVAL]}},
        "question": {"interrupt": {"items": [QUESTION]}},
        "both": {"interrupt": {"items": [APPROVAL, QUESTION]}, "seq": 5, **META},
        "bare_item": {"interrupt": {"items": [{"id": "i", "kind": "INTERRUPT_KIND_QUESTION"}]}},
        "empty_item": {"interrupt": {"items": [{}]}},
        "kind_unknown": {"interrupt": {"items": [{"id": "i", "kind": 9, "tool_name": "t"}]}},
        "actions_unknown": {
            "interrupt": {
                "items": [
                    {"id": "i", "kind": "INTERRUPT_KIND_APPROVAL", "allowed_actions": [99, "DECISION_ACTION_SKIP", 0]},
                    {"id": "j", "kind": "INTERRUPT_KIND_APPROVAL", "allowed_actions": [99]},
                ]
            }
        },
        "times": {
            "interrupt": {
                "items": [
                    {"id": "a", "kind": "INTERRUPT_KIND_APPROVAL", "expire_time": "1970-01-01T00:00:00Z"},
                    {"id": "b", "kind": "INTERRUPT_KIND_APPROVAL", "expire_time": "2026-02-28T23:59:59.000001Z"},
                    {"id": "c", "kind": "INTERRUPT_KIND_APPROVAL", "expire_time": "9999-12-31T23:59:59.999999999Z"},
                    {"id": "d", "kind": "INTERRUPT_KIND_APPROVAL", "expire_time": "0001-01-01T00:00:00Z"},
                ]
            }
        },
    },
    "rewind": {
        "empty": {"rewind": {}},
        "content": {"rewind": {"content": "你好"}},
        "reasoning": {"rewind": {"content": "a", "reasoning": "想"}},
        "reason": {"rewind": {"content": "a", "reason": "model.stream_broken"}},
        "attempt": {"rewind": {"content": "a", "attempt": 2}},
        "attempt_negative": {"rewind": {"content": "a", "attempt": -2}},
        "everything": {
            "rewind": {"content": "a", "reasoning": "b", "reason": "c", "attempt": 3},
            "seq": 6,
            **META,
        },
    },
    "envelope": {
        "seq": {"delta": {"content": "a"}, "seq": 1},
        "seq_max": {"delta": {"content": "a"}, "seq": 2147483647},
        "seq_negative": {"delta": {"content": "a"}, "seq": -1},
        "trace_id": {"delta": {"content": "a"}, "trace_id": TRACE},
        "tenant_id": {"delta": {"content": "a"}, "tenant_id": "租户"},
        "claw": {"delta": {"content": "a"}, "claw": "im_wechat"},
        "run_id": {"delta": {"content": "a"}, "run_id": RUN},
        "all_on_delta": {"delta": {"content": "a"}, "seq": 1, **META},
        "all_on_reasoning": {"reasoning": {"content": "a"}, "seq": 2, **META},
        "all_on_step": {**step("STEP_KIND_THINKING", text="t"), "seq": 3, **META},
        "all_on_done": {"done": {"message_id": "m", "conversation_id": "c"}, "seq": 4, **META},
        "all_on_error": {"error": {"message": "m"}, "seq": 5, **META},
        "without_payload": {"seq": 6, **META},
        "nothing": {},
    },
}
