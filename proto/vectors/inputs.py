"""What ``from_wire`` and parsers of the binary form are given, with the wire text they must arrive at.

All written by hand. ``FROM_WIRE``: name -> (input, wire). Both are JSON texts; the input may hold NaN and lone
surrogates, which Python's reader accepts. ``FROM_BINARY``: name -> (hex, wire): bytes that protobuf JSON cannot
write down, such as an event of a newer engine. wire None: there is no wire form.
"""

STEP = '{"type": "skill", "name": "n", "args": {}, "result": ""}'
DONE = (
    '{"type": "done", "message_id": "", "conversation_id": "", "content": "", "process_steps": [], '
    '"used_skills": [], "used_mcp": [], "generating": false}'
)
DEEP = '{"a": ' * 100 + "{}" + "}" * 100
LEVEL_100 = '{"a": ' * 99 + "{}" + "}" * 99
INTERRUPT = (
    '{"type": "interrupt", "items": [{"id": "i", "kind": "approval", "tool_name": "t", "args": {"a": 1}, '
    '"prompt": "p", "allowed_actions": ["approve", "reject", "edit", "skip", "respond"], '
    '"response_schema": {"type": "string"}, "path": ["r", "t"], "args_hash": "h", '
    '"expire_time": "2026-01-02T03:04:05Z"}], "seq": 4}'
)
REPLACED = "\ufffd"

FROM_WIRE: dict[str, tuple[str, str | None]] = {
    # What is no event.
    "null": ("null", None),
    "a_list": ('[{"type": "delta"}]', None),
    "a_string": ('"delta"', None),
    "a_number": ("7", None),
    "no_type": ('{"content": "a"}', None),
    "type_null": ('{"type": null}', None),
    "type_of_wrong_type": ('{"type": ["delta"]}', None),
    "type_unknown": ('{"type": "plan", "content": "a"}', None),
    "type_of_other_case": ('{"type": "Delta", "content": "a"}', None),
    "step_missing": ('{"type": "step"}', None),
    "step_of_wrong_type": ('{"type": "step", "step": "skill"}', None),
    "step_without_kind": ('{"type": "step", "step": {"name": "n"}}', None),
    "step_of_unknown_kind": ('{"type": "step", "step": {"type": "dance", "name": "n"}}', None),
    "step_of_kind_of_wrong_type": ('{"type": "step", "step": {"type": 2, "name": "n"}}', None),
    # Values that are missing or wrong.
    "delta_bare": ('{"type": "delta"}', '{"type": "delta", "content": ""}'),
    "delta_null": ('{"type": "delta", "content": null}', '{"type": "delta", "content": ""}'),
    "delta_number": ('{"type": "delta", "content": 5}', '{"type": "delta", "content": ""}'),
    "delta_list": ('{"type": "delta", "content": ["a"]}', '{"type": "delta", "content": ""}'),
    "keys_in_any_order": (
        '{"run_id": "r", "content": "a", "type": "delta"}',
        '{"type": "delta", "content": "a", "run_id": "r"}',
    ),
    "unknown_keys": (
        '{"type": "delta", "content": "a", "usage": {"x": 1}, "": 2}',
        '{"type": "delta", "content": "a"}',
    ),
    "last_duplicate_key": ('{"type": "delta", "content": "a", "content": "b"}', '{"type": "delta", "content": "b"}'),
    "reasoning_wrong": ('{"type": "reasoning", "content": {}}', '{"type": "reasoning", "content": ""}'),
    "done_bare": ('{"type": "done"}', DONE),
    "done_all_wrong": (
        (
            '{"type": "done", "message_id": [], "conversation_id": {}, "content": 1, "process_steps": {}, '
            '"used_skills": "weather", "used_mcp": 3, "generating": "yes"}'
        ),
        DONE,
    ),
    "done_generating_1": ('{"type": "done", "generating": 1}', DONE),
    "done_usage_never_on_the_wire": ('{"type": "done", "usage": {"input_tokens": 1}, "stop_reason": "finished"}', DONE),
    "done_wrong_elements": (
        (
            '{"type": "done", "process_steps": [null, 1, "x", [], {}, {"type": "dance"}, '
            '{"type": "skill", "name": "n"}], '
            '"used_skills": ["a", 1, null, ["b"], "c"], "used_mcp": [true, "d"]}'
        ),
        '{"type": "done", "message_id": "", "conversation_id": "", "content": "", "process_steps": ['
        + STEP
        + '], "used_skills": ["a", "c"], "used_mcp": ["d"], "generating": false}',
    ),
    "error_wrong": ('{"type": "error", "message": 5, "diagnosis": "bad"}', '{"type": "error", "message": ""}'),
    "error_diagnosis_empty": (
        '{"type": "error", "message": "m", "diagnosis": {}}',
        '{"type": "error", "message": "m"}',
    ),
    "diagnosis_part": (
        (
            '{"type": "error", "message": "m", "diagnosis": {"code": "c", "severity": "fatal", '
            '"retryable": 1, "detail": 2}}'
        ),
        (
            '{"type": "error", "message": "m", "diagnosis": {"code": "c", "severity": "", "summary": "", "detail": "", '
            '"hint": "", "retryable": false}}'
        ),
    ),
    "rewind_wrong": (
        '{"type": "rewind", "content": 1, "reasoning": 2, "reason": [], "attempt": "3"}',
        '{"type": "rewind", "content": ""}',
    ),
    "rewind_attempt_out_of_range": (
        '{"type": "rewind", "content": "a", "attempt": 2147483648}',
        '{"type": "rewind", "content": "a"}',
    ),
    # Steps.
    "step_bare": ('{"type": "step", "step": {"type": "skill", "name": "n"}}', '{"type": "step", "step": ' + STEP + "}"),
    "step_all_wrong": (
        (
            '{"type": "step", "step": {"type": "mcp", "server": 1, "name": 2, "args": "x", "result": 3, '
            '"diagnosis": [], '
            '"phase": 2, "node": "n"}, "index": "1"}'
        ),
        '{"type": "step", "step": {"type": "mcp", "server": "", "name": "", "args": {}, "result": ""}}',
    ),
    "step_phase_unknown": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "phase": "paused"}}',
        '{"type": "step", "step": ' + STEP + "}",
    ),
    "step_node_empty": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "node": {"id": "", "x": 1}}}',
        '{"type": "step", "step": ' + STEP + "}",
    ),
    "step_call_ids_never_on_the_wire": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "call_id": "c", "parent_call_id": "p"}}',
        '{"type": "step", "step": ' + STEP + "}",
    ),
    "thinking_keeps_text_only": (
        '{"type": "step", "step": {"type": "thinking", "text": "t", "name": "n", "args": {"a": 1}, "result": "r"}}',
        '{"type": "step", "step": {"type": "thinking", "text": "t"}}',
    ),
    "index_0": (
        '{"type": "step", "step": ' + STEP + ', "index": 0}',
        '{"type": "step", "step": ' + STEP + ', "index": 0}',
    ),
    "index_false": ('{"type": "step", "step": ' + STEP + ', "index": false}', '{"type": "step", "step": ' + STEP + "}"),
    "index_negative": ('{"type": "step", "step": ' + STEP + ', "index": -1}', '{"type": "step", "step": ' + STEP + "}"),
    "index_float": ('{"type": "step", "step": ' + STEP + ', "index": 1.0}', '{"type": "step", "step": ' + STEP + "}"),
    # Ids and numbers.
    "integer_ids": (
        (
            '{"type": "done", "message_id": 17, "conversation_id": -3, "trace_id": 1, '
            '"tenant_id": 2, "run_id": 3, "claw": 4}'
        ),
        (
            '{"type": "done", "message_id": "17", "conversation_id": "-3", "content": "", "process_steps": [], '
            '"used_skills": [], "used_mcp": [], "generating": false, "trace_id": "1", "tenant_id": "2", "run_id": "3"}'
        ),
    ),
    "big_integer_id": (
        '{"type": "delta", "content": "a", "run_id": 123456789012345678901234567890}',
        '{"type": "delta", "content": "a", "run_id": "123456789012345678901234567890"}',
    ),
    "zero_id": ('{"type": "delta", "content": "a", "run_id": 0}', '{"type": "delta", "content": "a", "run_id": "0"}'),
    "booleans_are_no_ids": (
        '{"type": "delta", "content": "a", "run_id": true, "tenant_id": false}',
        '{"type": "delta", "content": "a"}',
    ),
    "floats_are_no_ids": ('{"type": "delta", "content": "a", "run_id": 1.0}', '{"type": "delta", "content": "a"}'),
    "node_integer_id": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "node": {"id": 5, "type": 6, "label": 7}}}',
        (
            '{"type": "step", "step": {"type": "skill", "name": "n", "args": {}, "result": "", '
            '"node": {"id": "5", "type": "", "label": ""}}}'
        ),
    ),
    "seq_0": ('{"type": "delta", "content": "a", "seq": 0}', '{"type": "delta", "content": "a"}'),
    "seq_max": (
        '{"type": "delta", "content": "a", "seq": 2147483647}',
        '{"type": "delta", "content": "a", "seq": 2147483647}',
    ),
    "seq_out_of_range": ('{"type": "delta", "content": "a", "seq": 2147483648}', '{"type": "delta", "content": "a"}'),
    "seq_negative": ('{"type": "delta", "content": "a", "seq": -1}', '{"type": "delta", "content": "a"}'),
    "seq_true": ('{"type": "delta", "content": "a", "seq": true}', '{"type": "delta", "content": "a"}'),
    "seq_text": ('{"type": "delta", "content": "a", "seq": "3"}', '{"type": "delta", "content": "a"}'),
    "seq_float": ('{"type": "delta", "content": "a", "seq": 3.0}', '{"type": "delta", "content": "a"}'),
    # Bad text and bad numbers never cross.
    "lone_surrogate": (
        '{"type": "delta", "content": "a\\ud83cb"}',
        '{"type": "delta", "content": "a' + REPLACED + 'b"}',
    ),
    "two_lone_surrogates": (
        '{"type": "delta", "content": "\\udf78\\ud83c"}',
        '{"type": "delta", "content": "' + REPLACED * 2 + '"}',
    ),
    "surrogate_pair": ('{"type": "delta", "content": "\\ud83c\\udf78"}', '{"type": "delta", "content": "🍸"}'),
    "surrogates_everywhere": (
        (
            '{"type": "step", "step": {"type": "mcp", "server": "\\ud800", "name": "\\ud800", '
            '"args": {"\\ud800": ["\\udfff"]}, "result": "\\ud800", "node": {"id": "\\ud800"}}, "run_id": "\\ud800"}'
        ),
        (
            '{"type": "step", "step": {"type": "mcp", "server": "X", "name": "X", "args": {"X": ["X"]}, "result": "X", '
            '"node": {"id": "X", "type": "", "label": ""}}, "run_id": "X"}'
        ).replace("X", REPLACED),
    ),
    "nan_and_infinity": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "args": {"a": NaN, "b": [Infinity, -Infinity, 1.5]}}}',
        (
            '{"type": "step", "step": {"type": "skill", "name": "n", "args": {"a": null, '
            '"b": [null, null, 1.5]}, "result": ""}}'
        ),
    ),
    "numbers_exact": (
        (
            '{"type": "step", "step": {"type": "skill", "name": "n", '
            '"args": {"i": 9007199254740993, "a": 1e16, "b": 1e-7, "c": 1.0, "d": 1, "e": -0.0}}}'
        ),
        (
            '{"type": "step", "step": {"type": "skill", "name": "n", '
            '"args": {"i": 9007199254740993, "a": 1e+16, "b": 1e-07, "c": 1.0, "d": 1, "e": -0.0}, "result": ""}}'
        ),
    ),
    "args_depth_100": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "args": ' + LEVEL_100 + "}}",
        '{"type": "step", "step": {"type": "skill", "name": "n", "args": ' + LEVEL_100 + ', "result": ""}}',
    ),
    "args_depth_101": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "args": ' + DEEP + "}}",
        '{"type": "step", "step": ' + STEP + "}",
    ),
    "args_digits_4001": (
        '{"type": "step", "step": {"type": "skill", "name": "n", "args": {"a": ' + "1" * 4001 + ', "b": 2}}}',
        '{"type": "step", "step": {"type": "skill", "name": "n", "args": {"a": null, "b": 2}, "result": ""}}',
    ),
    # Interrupts.
    "interrupt_bare": ('{"type": "interrupt"}', '{"type": "interrupt", "items": []}'),
    "interrupt_wrong_elements": (
        '{"type": "interrupt", "items": [1, null, [], {"id": 7, "kind": "approval"}, {"kind": "riddle"}]}',
        '{"type": "interrupt", "items": [{"id": "7", "kind": "approval"}, {"id": "", "kind": ""}]}',
    ),
    "interrupt_all_wrong": (
        (
            '{"type": "interrupt", "items": [{"id": "i", "kind": "question", "tool_name": 1, "args": [], "prompt": 2, '
            '"allowed_actions": ["dance", 1, "skip"], "response_schema": true, "path": "a/b", '
            '"args_hash": 3, "expire_time": 4}]}'
        ),
        '{"type": "interrupt", "items": [{"id": "i", "kind": "question", "allowed_actions": ["skip"]}]}',
    ),
    "interrupt_whole": (INTERRUPT, INTERRUPT),
    **{
        f"expire_time_{name}": (
            '{"type": "interrupt", "items": [{"id": "i", "kind": "approval", "expire_time": "' + given + '"}]}',
            '{"type": "interrupt", "items": [{"id": "i", "kind": "approval"'
            + (f', "expire_time": "{kept}"' if kept else "")
            + "}]}",
        )
        for name, given, kept in (
            ("offset", "2026-01-02T03:04:05+08:00", "2026-01-01T19:04:05Z"),
            ("fraction", "2026-01-02T03:04:05.1Z", "2026-01-02T03:04:05.100Z"),
            ("nanoseconds", "2026-01-02T03:04:05.123456789Z", "2026-01-02T03:04:05.123456789Z"),
            ("lower_case", "2026-01-02t03:04:05z", "2026-01-02T03:04:05Z"),
            ("before_1970", "1969-12-31T23:59:59.5Z", "1969-12-31T23:59:59.500Z"),
            ("without_zone", "2026-01-02T03:04:05", ""),
            ("date_only", "2026-01-02", ""),
            ("no_such_day", "2026-02-30T00:00:00Z", ""),
            ("before_year_1", "0001-01-01T00:00:00+01:00", ""),
            ("after_year_9999", "9999-12-31T23:59:59-01:00", ""),
            ("year_0", "0000-01-01T00:00:00Z", ""),
            ("words", "tomorrow", ""),
        )
    },
}

FROM_BINARY: dict[str, tuple[str, str | None]] = {
    "empty": ("", None),
    # seq = 1 (08 01), payload field 31 (fa 01) with 2 bytes.
    "payload_of_a_newer_engine": ("0801fa01020a00", None),
    # delta (52) of 7 bytes: content "hi" (0a 02), field 9 = "n" (4a 01).
    "field_of_a_newer_engine_in_delta": ("52070a0268694a016e", '{"type": "delta", "content": "hi"}'),
    # delta "a" and envelope field 6 = "x" (32 01 78).
    "field_of_a_newer_engine_in_the_envelope": ("320178" + "52030a0161", '{"type": "delta", "content": "a"}'),
    # step (62): step (0a) with kind 99 (08 63), name "n".
    "step_kind_of_a_newer_engine": ("62070a050863" + "12016e", None),
    # Two payloads: the last one counts.
    "last_payload_wins": ("52030a0161" + "5a030a0162", '{"type": "reasoning", "content": "b"}'),
    # interrupt (7a): items (0a): id "i", kind 1, expire_time (52): seconds 253402300800, the year 10000.
    "expire_time_beyond_year_9999": (
        "7a100a0e0a01691001" + "5207" + "088083d1ffaf07",
        '{"type": "interrupt", "items": [{"id": "i", "kind": "approval"}]}',
    ),
    # The same with seconds 1 and nanos -1, which is no time either.
    "expire_time_with_negative_nanos": (
        "7a160a140a01691001" + "520d" + "080110ffffffffffffffffff01",
        '{"type": "interrupt", "items": [{"id": "i", "kind": "approval"}]}',
    ),
}
