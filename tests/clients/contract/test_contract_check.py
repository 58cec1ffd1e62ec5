"""The gate for others: every way of breaking a reader that its rules are for, and additions that must pass."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualclaw_clients.contract_check import vectors
from dualclaw_clients.contract_check.buf import WHO, BufError, breaking, build, find_buf
from dualclaw_clients.contract_check.command import check
from dualclaw_clients.contract_check.rules import RULES, WIRE_KEYS, judge
from dualclaw_clients.contract_check.schema import Schema

from .conftest import BASELINE, ROOT, Protos

EVENT = "dualclaw/v1/event.proto"
RUN = "dualclaw/v1/run.proto"
HEAD = 'syntax = "proto3";\npackage dualclaw.v1;\n'


@dataclass(frozen=True)
class Mutation:
    """A change to a proto, the rule that must refuse it, and what it must name."""

    rule: str
    file: str
    old: str
    new: str
    where: str


MUTATIONS = (
    Mutation("PRESENCE_LOST", EVENT, "optional int32 index = 2;", "int32 index = 2;", "StepEvent.index"),
    Mutation("PRESENCE_LOST", EVENT, "optional int32 cached_tokens", "int32 cached_tokens", "Usage.cached_tokens"),
    Mutation("PRESENCE_GAINED", EVENT, "  int32 attempt = 4;", "  optional int32 attempt = 4;", "Rewind.attempt"),
    Mutation("WIRE_KEY_LOST", EVENT, "string hint = 5;", "string advice = 5;", "Diagnosis.hint"),
    Mutation("WIRE_KEY_LOST", EVENT, "  bool generating = 7;", "  reserved 7;", "Done.generating"),
    Mutation("WIRE_KEY_RETYPED", EVENT, "bool retryable = 6;", "string retryable = 6;", "Diagnosis.retryable"),
    Mutation("ENUM_NAME_CHANGED", EVENT, "PHASE_FAIL = 3;", "PHASE_FAILED = 3;", "Phase.PHASE_FAIL"),
    Mutation("ENUM_NAME_CHANGED", EVENT, "PHASE_FAIL = 3;", "PHASE_LOST = 4;", "Phase.PHASE_FAIL"),
    Mutation(
        "ENUM_NAME_PREFIX", EVENT, "  PHASE_FAIL = 3;\n", "  PHASE_FAIL = 3;\n  // New.\n  LOST = 4;\n",
        "Phase.LOST",
    ),
    Mutation(
        "ENUM_NAME_PREFIX", RUN, "enum BusyPolicy {", "enum Colour {\n  COLOUR_RED = 0;\n}\n\nenum BusyPolicy {",
        "Colour.COLOUR_RED",
    ),
    Mutation(
        "INTEGER_64_BIT", EVENT, "  bool retryable = 6;\n", "  bool retryable = 6;\n  int64 wait_ms = 7;\n",
        "Diagnosis.wait_ms",
    ),
    Mutation("INTEGER_64_BIT", EVENT, "int32 seq = 1;", "int64 seq = 1;", "EngineEvent.seq"),
    Mutation(
        "PAYLOAD_OUTSIDE_ONEOF", EVENT, "Rewind rewind = 16;\n  }\n", "Rewind rewind = 16;\n  }\n  Delta plan = 17;\n",
        "EngineEvent.plan",
    ),
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.rule}-{m.where.rpartition('.')[2]}")
def test_a_change_that_breaks_a_reader_is_refused_by_its_rule(baseline, protos, mutation: Mutation) -> None:
    """The rule that is there for it names the thing and says who would notice."""
    protos.edit(mutation.file, mutation.old, mutation.new)
    found = [finding for finding in judge(baseline, protos.schema()) if finding.rule == mutation.rule]
    assert [finding.where for finding in found] == [f"dualclaw.v1.{mutation.where}"]
    assert found[0].who


def test_a_new_file_without_its_options_is_refused(baseline, protos) -> None:
    """Buf compares files that were there before; Go and Java imports of a new one are settled with its first commit."""
    (protos.folder / "proto/dualclaw/v1/plan.proto").write_text(HEAD + "message Plan {}\n")
    (found,) = judge(baseline, protos.schema())
    assert (found.rule, found.where) == ("FILE_OPTIONS", "dualclaw/v1/plan.proto")
    assert "go_package, java_package, java_multiple_files" in found.what


def test_every_rule_has_a_mutation() -> None:
    """A rule that nothing tries could be one that never fails."""
    assert {rule.id for rule in RULES} == {mutation.rule for mutation in MUTATIONS} | {"FILE_OPTIONS"}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (EVENT, "  bool retryable = 6;\n", "  bool retryable = 6;\n  // New.\n  optional int32 wait = 7;\n"),
        (EVENT, "    Rewind rewind = 16;\n", "    Rewind rewind = 16;\n    // New.\n    Delta plan = 17;\n"),
        (EVENT, "  PHASE_FAIL = 3;\n", "  PHASE_FAIL = 3;\n  // New.\n  PHASE_LOST = 4;\n"),
        (EVENT, "// Kind of a step.\n", "// New.\nmessage Plan {}\n\n// Kind of a step.\n"),
    ],
    ids=["field", "payload", "enum value", "message"],
)
def test_an_addition_passes_everything(protos, file: str, old: str, new: str) -> None:
    """What only adds breaks nobody: not buf, not the rules, not the vectors."""
    protos.edit(file, old, new)
    verdict = check(str(protos.folder), str(BASELINE))
    assert verdict.findings == ()
    assert verdict.vectors > 100


def test_todays_protos_break_nothing() -> None:
    """The repository passes its own gate."""
    assert check(str(ROOT), str(BASELINE)).findings == ()


def test_the_table_of_wire_keys_names_fields_that_exist(baseline) -> None:
    """A key that is misspelt here would be guarded by nobody."""
    names = {f"{message}.{field}" for message, fields in WIRE_KEYS.items() for field in fields}
    assert names <= set(baseline.fields)


def test_every_key_the_vectors_show_is_guarded() -> None:
    """What the wire format writes comes from fields of the table: no key of any vector is without one."""
    renamed = {"type": "kind", "args": "args_json", "response_schema": "response_schema_json"}
    guarded = {field for fields in WIRE_KEYS.values() for field in fields}
    free = {"args", "response_schema"}
    for vector in vectors.load(ROOT / "proto/vectors").values():
        if vector["wire"] is None:
            continue
        for key in keys(json.loads(str(vector["wire"])), free):
            assert renamed.get(key, key) in guarded, key


def keys(value: object, free: set[str]) -> set[str]:
    """Return the keys of a JSON value at any depth, without what stands in free-form keys."""
    if isinstance(value, list):
        return set().union(*(keys(each, free) for each in value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(keys(each, free) for name, each in value.items() if name not in free))


# ---- vectors


def found_by_vectors(old: Schema, protos: Protos) -> set[str]:
    known = vectors.load(ROOT / "proto/vectors")
    return {finding.rule for finding in vectors.judge_schema(old, protos.schema(), known)}


def test_a_renumbered_field_misreads_stored_bytes(baseline, protos) -> None:
    """Bytes of the release no longer say what they said."""
    protos.edit(EVENT, "string hint = 5;", "string hint = 15;")
    assert found_by_vectors(baseline, protos) == {"VECTOR_BYTES", "VECTOR_JSON"}


def test_a_renamed_field_refuses_stored_json(baseline, protos) -> None:
    """The same bytes, other names: protobuf JSON of the release is not taken any more."""
    protos.edit(EVENT, "string hint = 5;", "string advice = 5;")
    assert found_by_vectors(baseline, protos) == {"VECTOR_BYTES", "VECTOR_JSON"}


def test_a_wider_integer_reads_as_text_in_json(baseline, protos) -> None:
    """int32 to int64 keeps every byte, and still JSON readers get "5" where they had 5."""
    protos.edit(EVENT, "int32 seq = 1;", "int64 seq = 1;")
    assert "VECTOR_BYTES" in found_by_vectors(baseline, protos)


def test_vectors_that_were_changed_or_removed_are_told(protos) -> None:
    """A change cannot make itself pass by editing what is promised."""
    path = protos.folder / "proto/vectors/delta.json"
    entries = json.loads(path.read_text())
    removed = entries.pop(0)["name"]
    entries[0]["wire"] = entries[0]["wire"].replace("content", "text")
    path.write_text(json.dumps(entries))
    verdict = check(str(protos.folder), str(BASELINE), str(ROOT / "proto/vectors"))
    told = {(finding.rule, finding.where) for finding in verdict.findings}
    assert told == {
        ("VECTOR_REMOVED", f"vector delta/{removed}"),
        ("VECTOR_CHANGED", f"vector delta/{entries[0]['name']}"),
    }


# ---- buf and the command


def test_findings_of_buf_say_who_would_notice(protos) -> None:
    """Buf's line and words, and beside them what breaks for whom."""
    protos.edit(EVENT, "string hint = 5;", "string advice = 5;")
    found = breaking(find_buf(), str(protos.folder), str(BASELINE))
    assert {finding.rule for finding in found} == {"FIELD_SAME_NAME", "FIELD_SAME_JSON_NAME"}
    assert all(finding.file.endswith(EVENT) and finding.line and finding.who == WHO[finding.rule] for finding in found)


def test_a_folder_may_be_the_baseline_and_its_vectors_count(protos) -> None:
    """Whatever buf reads is a baseline; a folder brings its vectors along."""
    verdict = check(str(ROOT), str(protos.folder))
    assert (verdict.findings, verdict.vectors > 100) == ((), True)


def test_protos_that_do_not_compile_are_not_judged(protos) -> None:
    """No verdict is better than a wrong one."""
    protos.edit(EVENT, "string hint = 5;", "string hint = ;")
    with pytest.raises(BufError, match="cannot be built"):
        build(find_buf(), str(protos.folder))


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as people do."""
    return subprocess.run(
        [sys.executable, "-m", "dualclaw_clients.cli", "contract", "check", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_says_what_breaks_for_whom_and_exits_with_1(protos) -> None:
    """Each finding is a line with its rule and a line with who is hit; the same as JSON for programs."""
    protos.edit(EVENT, "PHASE_FAIL = 3;", "PHASE_FAILED = 3;")
    told = run("--against", str(BASELINE), str(protos.folder))
    assert told.returncode == 1, told.stderr
    assert "dualclaw.v1.Phase.PHASE_FAIL: is called PHASE_FAILED now [ENUM_NAME_CHANGED]" in told.stdout
    assert "Old front-ends" in told.stdout
    as_json = run("--json", "--against", str(BASELINE), str(protos.folder))
    lines = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert as_json.returncode == 1
    assert {"ENUM_NAME_CHANGED", "ENUM_VALUE_SAME_NAME"} <= {line.get("rule") for line in lines}
    assert lines[-1]["findings"] == len(lines) - 1


def test_the_command_passes_what_breaks_nothing() -> None:
    """Exit code 0, and what was looked at."""
    told = run("--against", str(BASELINE))
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("nothing breaks; judged by buf breaking")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "no-such.binpb"], "no-such.binpb"),
        (["--against", str(BASELINE), "--vectors", "docs"], "holds no vectors"),
    ],
)
def test_what_cannot_be_judged_is_2_and_says_why(arguments: list[str], words: str) -> None:
    """A typing error in CI is no pass."""
    told = run(*arguments)
    assert told.returncode == 2
    assert words in told.stderr
    assert "Traceback" not in told.stderr


def test_without_buf_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    """Neither on PATH nor beside Python: the message names both ways out."""
    code = (
        "import sys; sys.executable = sys.argv.pop(1); from dualclaw_clients.cli import main;"
        "raise SystemExit(main(sys.argv[1:]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "python"), "contract", "check", "--against", str(BASELINE)],
        cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 2
    assert "pip install buf-bin" in told.stderr
