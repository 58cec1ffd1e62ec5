"""The gate that keeps the contract: lint, format, breaking changes, drift of generated code, names and numbers.

A gate that cannot fail is no gate, so every way of breaking a reader is tried on a copy of the protos and must be
refused by the rule that is meant to refuse it; an addition must pass.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor

from dualclaw import (
    AttachRequest,
    EngineEvent,
    ErrorReason,
    GetAgentRequest,
    GetConversationRequest,
    InspectRunRequest,
    Message,
    Run,
)

Command = Callable[..., "CompletedProcess[str]"]
BASELINE = "v0.1.0.binpb"
ADDED_SINCE = {"dualclaw/v1/operator_service.proto"}
"""Files that no release has had yet; a new image takes them in and empties this."""
FILES: tuple[FileDescriptor, ...] = (
    EngineEvent.DESCRIPTOR.file,
    Message.DESCRIPTOR.file,
    Run.DESCRIPTOR.file,
    AttachRequest.DESCRIPTOR.file,
    GetConversationRequest.DESCRIPTOR.file,
    GetAgentRequest.DESCRIPTOR.file,
    InspectRunRequest.DESCRIPTOR.file,
    ErrorReason.DESCRIPTOR.file,
)


def breaking(buf: Command, root: Path, folder: Path) -> "CompletedProcess[str]":
    """Hold the protos of ``folder`` (which has a buf.yaml) against the released image."""
    image = root / "proto" / "baseline" / BASELINE
    return buf("breaking", "--against", f"{image}#format=binpb", "--error-format=json", cwd=folder)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the protos to be broken."""
    shutil.copy(root / "buf.yaml", tmp_path)
    shutil.copytree(root / "proto" / "dualclaw", tmp_path / "proto" / "dualclaw")
    return tmp_path


def test_protos_pass_lint(buf: Command) -> None:
    """Names, comments and layout follow the standard rules."""
    done = buf("lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_demands_comments(buf: Command, copy: Path) -> None:
    """A field without a comment is refused, so the lint is really configured."""
    edit(copy, "dualclaw/v1/event.proto", "  // What kind of step.\n", "")
    done = buf("lint", cwd=copy)
    assert done.returncode != 0
    assert 'Field "kind" should have a non-empty comment' in done.stdout


def test_protos_are_formatted(buf: Command) -> None:
    """The protos look as the formatter writes them."""
    done = buf("format", "-d", "--exit-code")
    assert done.returncode == 0, done.stdout + done.stderr


def test_protos_break_no_reader_of_the_release(buf: Command, root: Path) -> None:
    """Against the released image nothing breaks."""
    done = breaking(buf, root, root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_baseline_holds_every_file_of_the_release(buf: Command, root: Path) -> None:
    """An empty or partial image would let everything pass; what came later is in the next release's image."""
    done = buf("ls-files", f"{root / 'proto' / 'baseline' / BASELINE}#format=binpb", "--format=import")
    wanted = {path.relative_to(root / "proto").as_posix() for path in (root / "proto" / "dualclaw").rglob("*.proto")}
    assert done.returncode == 0, done.stderr
    assert {line for line in done.stdout.split() if line.startswith("dualclaw/")} == wanted - ADDED_SINCE
    assert wanted > ADDED_SINCE


EVENT = "dualclaw/v1/event.proto"
RUN = "dualclaw/v1/run.proto"
ENGINE = "dualclaw/v1/engine_service.proto"
CHECKPOINT = "dualclaw/checkpoint/v1/checkpoint.proto"


@dataclass(frozen=True)
class Mutation:
    """A change to a proto file, and the rule of buf that must refuse it."""

    name: str
    file: str
    old: str
    new: str
    rule: str


MUTATIONS = (
    Mutation("field_renumbered", EVENT, "string code = 1;", "string code = 7;", "FIELD_NO_DELETE"),
    Mutation("field_retyped", EVENT, "int32 seq = 1;", "int64 seq = 1;", "FIELD_SAME_TYPE"),
    Mutation("field_removed", EVENT, "  // What to do about it.\n  string hint = 5;\n", "", "FIELD_NO_DELETE"),
    Mutation("field_renamed", EVENT, "string hint = 5;", "string advice = 5;", "FIELD_SAME_NAME"),
    Mutation("number_reused", EVENT, "bool retryable = 6;", "string owner = 6;", "FIELD_SAME_TYPE"),
    Mutation("presence_lost", EVENT, "optional int32 index = 2;", "int32 index = 2;", "FIELD_SAME_CARDINALITY"),
    Mutation(
        "presence_gained", EVENT, "  int32 attempt = 4;", "  optional int32 attempt = 4;", "FIELD_SAME_CARDINALITY"
    ),
    Mutation("made_repeated", EVENT, "  string hint = 5;", "  repeated string hint = 5;", "FIELD_SAME_CARDINALITY"),
    Mutation(
        "usage_presence_lost", EVENT, "optional int32 cached_tokens", "int32 cached_tokens", "FIELD_SAME_CARDINALITY"
    ),
    Mutation("enum_value_renumbered", EVENT, "PHASE_FAIL = 3;", "PHASE_FAIL = 4;", "ENUM_VALUE_NO_DELETE"),
    Mutation("enum_value_renamed", EVENT, "PHASE_FAIL = 3;", "PHASE_FAILED = 3;", "ENUM_VALUE_SAME_NAME"),
    Mutation(
        "enum_value_removed",
        EVENT,
        "  // It ended badly; see its diagnosis.\n  PHASE_FAIL = 3;\n",
        "",
        "ENUM_VALUE_NO_DELETE",
    ),
    Mutation(
        "field_leaves_its_oneof",
        RUN,
        "    InsertBefore insert_before = 4;\n  }\n",
        "  }\n  InsertBefore insert_before = 4;\n",
        "FIELD_SAME_ONEOF",
    ),
    Mutation(
        "map_value_retyped",
        RUN,
        "map<string, bool> interceptors",
        "map<string, string> interceptors",
        "FIELD_SAME_TYPE",
    ),
    Mutation("rpc_removed", ENGINE, "  rpc Cancel(CancelRequest) returns (CancelResponse);\n", "", "RPC_NO_DELETE"),
    Mutation(
        "rpc_request_changed", ENGINE, "rpc Cancel(CancelRequest)", "rpc Cancel(GetRunRequest)", "RPC_SAME_REQUEST_TYPE"
    ),
    Mutation(
        "rpc_response_changed", ENGINE, "returns (CancelResponse)", "returns (GetRunResponse)", "RPC_SAME_RESPONSE_TYPE"
    ),
    Mutation(
        "stream_lost",
        ENGINE,
        "returns (stream AttachResponse)",
        "returns (AttachResponse)",
        "RPC_SAME_SERVER_STREAMING",
    ),
    Mutation("service_renamed", ENGINE, "service EngineService {", "service AgentEngineService {", "SERVICE_NO_DELETE"),
    Mutation("go_package_changed", EVENT, ";dualclawv1", ";dcv1", "FILE_SAME_GO_PACKAGE"),
    Mutation("java_package_changed", EVENT, '"dev.dualclaw.v1"', '"dev.claw.v1"', "FILE_SAME_JAVA_PACKAGE"),
    Mutation(
        "java_files_merged",
        EVENT,
        "java_multiple_files = true",
        "java_multiple_files = false",
        "FILE_SAME_JAVA_MULTIPLE_FILES",
    ),
    Mutation(
        "checkpoint_field_removed",
        CHECKPOINT,
        "  // Index of the next step.\n  int32 next_index = 9;\n",
        "",
        "FIELD_NO_DELETE",
    ),
    Mutation("checkpoint_stage_renumbered", CHECKPOINT, "STAGE_END = 3;", "STAGE_END = 9;", "ENUM_VALUE_NO_DELETE"),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_breaking_change_is_refused_by_its_rule(buf: Command, root: Path, copy: Path, mutation: Mutation) -> None:
    """Each way of breaking a reader is refused, by the rule that is there for it."""
    edit(copy, mutation.file, mutation.old, mutation.new)
    rules = refused_by(breaking(buf, root, copy))
    assert mutation.rule in rules


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [("Node", "Vertex", "MESSAGE_NO_DELETE"), ("BusyPolicy", "Busy", "ENUM_NO_DELETE")],
    ids=["message", "enum"],
)
def test_renamed_type_is_refused(buf: Command, root: Path, copy: Path, old: str, new: str, rule: str) -> None:
    """A message or enum of another name is refused, although every use was renamed with it."""
    for path in (copy / "proto").rglob("*.proto"):
        path.write_text(re.sub(rf"\b{old}\b", new, path.read_text()))
    assert rule in refused_by(breaking(buf, root, copy))


def test_deleted_service_is_refused(buf: Command, root: Path, copy: Path) -> None:
    """A service that is gone is refused, while its messages are still there."""
    path = copy / "proto" / ENGINE
    path.write_text(re.sub(r"service EngineService \{.*?\n\}\n", "", path.read_text(), flags=re.DOTALL))
    assert refused_by(breaking(buf, root, copy)) == {"SERVICE_NO_DELETE"}


def test_deleted_file_is_refused(buf: Command, root: Path, copy: Path) -> None:
    """A file that is gone is refused."""
    (copy / "proto/dualclaw/v1/agent_service.proto").unlink()
    assert refused_by(breaking(buf, root, copy)) == {"FILE_NO_DELETE"}


def test_message_moved_to_another_file_is_refused(buf: Command, root: Path, copy: Path) -> None:
    """A message in another file of the package is refused, because Python imports would break."""
    path = copy / "proto" / RUN
    found = re.search(r"// Where to insert a message\.\nmessage InsertBefore \{.*?\n\}\n", path.read_text(), re.DOTALL)
    assert found is not None
    edit(copy, RUN, found.group(), "")
    target = copy / "proto/dualclaw/v1/message.proto"
    target.write_text(target.read_text() + "\n" + found.group())
    assert refused_by(breaking(buf, root, copy)) == {"MESSAGE_NO_DELETE"}


ADDITIONS = (
    Mutation("field", EVENT, "  bool retryable = 6;\n", "  bool retryable = 6;\n  // New.\n  string owner = 7;\n", ""),
    Mutation(
        "payload",
        EVENT,
        "    Rewind rewind = 16;\n",
        "    Rewind rewind = 16;\n    // New.\n    Delta plan = 17;\n",
        "",
    ),
    Mutation("enum_value", EVENT, "  PHASE_FAIL = 3;\n", "  PHASE_FAIL = 3;\n  // New.\n  PHASE_LOST = 4;\n", ""),
    Mutation("message", EVENT, "// Kind of a step.\n", "// New.\nmessage Plan {}\n\n// Kind of a step.\n", ""),
    Mutation(
        "rpc",
        ENGINE,
        "  // Returns a run.\n",
        "  // New.\n  rpc Pause(CancelRequest) returns (CancelResponse);\n  // Returns a run.\n",
        "",
    ),
)


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda m: m.name)
def test_addition_passes(buf: Command, root: Path, copy: Path, addition: Mutation) -> None:
    """What only adds is let through; a gate that refuses everything is no gate either."""
    edit(copy, addition.file, addition.old, addition.new)
    done = breaking(buf, root, copy)
    assert done.returncode == 0, done.stdout + done.stderr


def edit(copy: Path, file: str, old: str, new: str) -> None:
    """Replace a text that occurs in the file; the test is void when it does not."""
    path = copy / "proto" / file
    text = path.read_text()
    assert old in text, f"{old!r} is not in {file}"
    path.write_text(text.replace(old, new, 1))


def refused_by(done: "CompletedProcess[str]") -> set[str]:
    """The rules that refused, none when the protos no longer compile."""
    assert done.returncode != 0, "it was let through"
    assert not done.stderr.strip(), done.stderr
    found = {json.loads(line)["type"] for line in done.stdout.splitlines()}
    assert "COMPILE" not in found, done.stdout
    return found


@pytest.fixture
def generated(root: Path, tmp_path: Path) -> Path:
    """A copy of the whole proto folder, generated code included."""
    skip = shutil.ignore_patterns("__pycache__", "vectors", "baseline")
    return Path(shutil.copytree(root / "proto", tmp_path / "proto", ignore=skip))


def test_generated_code_is_what_the_protos_give(python: Command, root: Path) -> None:
    """The committed Python was generated from the committed protos."""
    done = python("proto/generate.py", "--check", cwd=root)
    assert done.returncode == 0, done.stderr


def test_drift_of_generated_code_is_refused(python: Command, generated: Path) -> None:
    """Generated files that were edited, emptied, removed or left over are refused, every one by its name."""
    folder = generated / "python/dualclaw"
    for edited in ("v1/event_pb2.py", "v1/event_pb2.pyi", "v1/engine_service_pb2_grpc.py"):
        (folder / edited).write_text((folder / edited).read_text() + "\n")
    (folder / "checkpoint/v1/checkpoint_pb2.py").write_text("")
    (folder / "v1/run_pb2.py").unlink()
    (folder / "v1/old_pb2.py").write_text("")
    done = python(str(generated / "generate.py"), "--check", cwd=generated.parent)
    assert done.returncode == 1
    named = set(re.findall(r"dualclaw/(\S+?\.pyi?)", done.stderr))
    assert named == {
        "v1/event_pb2.py",
        "v1/event_pb2.pyi",
        "v1/engine_service_pb2_grpc.py",
        "checkpoint/v1/checkpoint_pb2.py",
        "v1/run_pb2.py",
        "v1/old_pb2.py",
    }


def test_changed_proto_without_generation_is_refused(python: Command, generated: Path) -> None:
    """A proto that was edited alone is noticed."""
    edit(generated.parent, EVENT, "bool retryable = 6;", "bool retryable = 6;\n  // New.\n  string owner = 7;")
    done = python(str(generated / "generate.py"), "--check", cwd=generated.parent)
    assert done.returncode == 1
    assert "event_pb2.py" in done.stderr


def test_every_file_names_its_packages(root: Path) -> None:
    """Go and Java options are on every file from the first release, because adding them later breaks users."""
    options = {
        "dualclaw.v1": ("github.com/dualclaw/dualclaw-go/gen/dualclaw/v1;dualclawv1", "dev.dualclaw.v1"),
        "dualclaw.checkpoint.v1": (
            "github.com/dualclaw/dualclaw-go/gen/dualclaw/checkpoint/v1;checkpointv1",
            "dev.dualclaw.checkpoint.v1",
        ),
    }
    paths = sorted((root / "proto/dualclaw").rglob("*.proto"))
    assert len(paths) == 9
    for path in paths:
        text = path.read_text()
        package = re.search(r"^package (\S+);$", text, re.MULTILINE)
        assert package is not None
        go, java = options[package.group(1)]
        assert f'\noption go_package = "{go}";\n' in text, path
        assert f'\noption java_package = "{java}";\n' in text, path
        assert "\noption java_multiple_files = true;\n" in text, path


def test_names_numbers_and_types_are_those_of_the_contract(root: Path) -> None:
    """Every message, field, enum value and rpc is the one the design fixes, and there are no others."""
    table = (root / "tests/contract/fields.txt").read_text().splitlines()
    wanted = sorted(line.strip() for line in table if line and not line.startswith("#"))
    assert sorted(line for file in FILES for line in describe(file)) == wanted


def describe(file: FileDescriptor) -> Iterator[str]:
    """The lines of ``fields.txt`` that a file stands for."""
    for message in file.message_types_by_name.values():
        fields = sorted(message.fields, key=lambda field: field.number)
        yield f"{message.name}: {', '.join(map(field_text, fields))}".strip()
    for enum in file.enum_types_by_name.values():
        yield f"enum {enum.name}: {', '.join(values_of(enum))}"
    for service in file.services_by_name.values():
        yield f"service {service.name}: {', '.join(rpcs_of(service))}"


def field_text(field: FieldDescriptor) -> str:
    """One field as ``fields.txt`` writes it."""
    entry = field.message_type if field.message_type and field.message_type.GetOptions().map_entry else None
    oneof = field.containing_oneof
    parts = [str(field.number), field.name]
    if entry is not None:
        parts.append(f"map<{type_of(entry.fields[0], 'string')},{type_of(entry.fields[1], 'string')}>")
        return " ".join(parts)
    if oneof is not None and not oneof.name.startswith("_"):
        parts.append(f"|{oneof.name}:")
    elif oneof is not None:
        parts.append("optional")
    elif field.is_repeated:
        parts.append("repeated")
    return " ".join([*parts, type_of(field)]).strip()


def type_of(field: FieldDescriptor, plain: str = "") -> str:
    """The name of a field's type; ``plain`` for a string."""
    if field.message_type is not None:
        return str(field.message_type.name)
    if field.enum_type is not None:
        return str(field.enum_type.name)
    names = {
        FieldDescriptor.TYPE_STRING: plain,
        FieldDescriptor.TYPE_INT32: "int32",
        FieldDescriptor.TYPE_BOOL: "bool",
        FieldDescriptor.TYPE_BYTES: "bytes",
    }
    return names[field.type]


def values_of(enum: EnumDescriptor) -> Iterator[str]:
    """The values of an enum from 1 on, without prefix; its prefix, its zero and its numbering are checked."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    assert enum.values[0].name == f"{prefix}UNSPECIFIED"
    assert [value.number for value in enum.values] == list(range(len(enum.values)))
    for value in enum.values[1:]:
        assert value.name.startswith(prefix)
        yield value.name.removeprefix(prefix)


def rpcs_of(service: ServiceDescriptor) -> Iterator[str]:
    """The rpcs of a service."""
    for method in service.methods:
        assert not method.client_streaming
        stream = "stream " if method.server_streaming else ""
        yield f"{method.name}({method.input_type.name}) {stream}{method.output_type.name}"
