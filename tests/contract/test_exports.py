"""The public surface of the contract, name by name, and what importing it costs."""

import importlib
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

EVENTS = {
    "Meta", "canonical_json", "clean_text", "diagnosis_from_dict", "diagnosis_text", "diagnosis_to_dict", "from_wire",
    "make_delta", "make_diagnosis", "make_done", "make_error", "make_interrupt", "make_reasoning", "make_rewind",
    "make_step", "parse_args", "to_text", "to_wire",
}  # fmt: skip
MESSAGES = {
    "Agent", "AttachRequest", "AttachResponse", "BusyPolicy", "CancelRequest", "CancelResponse", "ContentPart",
    "Conversation", "Decision", "DecisionAction", "DeleteConversationRequest", "DeleteConversationResponse", "Delta",
    "Diagnosis", "DisconnectPolicy", "Done", "EffectClass", "EngineEvent", "Error", "ErrorReason", "FrameInfo",
    "GetAgentRequest", "GetAgentResponse", "GetConversationRequest", "GetConversationResponse", "GetRunRequest",
    "GetRunResponse", "HistoryEdit", "InsertBefore", "InspectRunRequest", "InspectRunResponse", "InterceptorInfo",
    "Interrupt", "InterruptItem", "InterruptKind", "ListAgentsRequest", "ListAgentsResponse",
    "ListConversationsRequest", "ListConversationsResponse", "ListMessagesRequest", "ListMessagesResponse",
    "ListRunsRequest", "ListRunsResponse", "Media", "Message", "Node", "OpenCall", "Phase", "PurgeRunRequest",
    "PurgeRunResponse", "Reasoning", "ReasoningPart", "ReleaseRunRequest", "ReleaseRunResponse", "RememberScope",
    "ResumeRequest", "ResumeResponse", "RetryMode", "RetryRunRequest", "RetryRunResponse", "Rewind", "Role", "Run",
    "RunOptions", "RunRequest", "RunResponse", "RunState", "SetInterceptorEnabledRequest",
    "SetInterceptorEnabledResponse", "Severity", "Step", "StepEvent", "StepKind", "StopReason", "Tool", "ToolCall",
    "ToolResult", "Usage",
}  # fmt: skip
RPC = {
    "AGENT_SERVICE", "CONVERSATION_SERVICE", "ENGINE_SERVICE", "OPERATOR_SERVICE", "AgentServiceAsyncStub",
    "AgentServiceServicer", "AgentServiceStub", "ConversationServiceAsyncStub", "ConversationServiceServicer",
    "ConversationServiceStub", "EngineServiceAsyncStub", "EngineServiceServicer", "EngineServiceStub",
    "OperatorServiceAsyncStub", "OperatorServiceServicer", "OperatorServiceStub", "add_agent_service",
    "add_conversation_service", "add_engine_service", "add_operator_service",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "names"), [("dualclaw", MESSAGES), ("dualclaw.events", EVENTS), ("dualclaw.rpc", RPC)]
)
def test_public_names_are_these(module: str, names: set[str]) -> None:
    """A name that comes or goes is a decision, taken here."""
    found = importlib.import_module(module)
    assert set(found.__all__) == names
    assert all(hasattr(found, name) for name in names)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dualclaw.errors", {"REASONS", "Reason", "HINTS", "EngineError", "FieldError", "diagnosis_code"}),
        ("dualclaw.fold", {"NOT_CARRIED_OUT", "RunView"}),
        ("dualclaw.rules", {"check_stream"}),
    ],
)
def test_module_defines_these(module: str, names: set[str]) -> None:
    """The public names a module defines itself."""
    found = importlib.import_module(module)
    own = {
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and (name.isupper() or getattr(value, "__module__", "") == module)
    }
    assert own | ({"Reason"} & set(vars(found))) == names


def test_every_message_of_the_schema_is_exported() -> None:
    """Nobody needs the generated modules: what the files define, the package exports."""
    dualclaw = importlib.import_module("dualclaw")
    files = {getattr(dualclaw, name).DESCRIPTOR.file for name in MESSAGES}
    defined = {name for file in files for name in (*file.message_types_by_name, *file.enum_types_by_name)}
    assert defined == MESSAGES


def test_view_has_these_attributes() -> None:
    """What adapters and engine read of a view."""
    view = importlib.import_module("dualclaw.fold").RunView()
    assert {name for name in dir(view) if not name.startswith("_")} == {
        "apply", "interrupts", "last_seq", "next_index", "open_steps", "process_steps", "reasoning", "steps",
        "terminal", "text", "used_mcp", "used_skills",
    }  # fmt: skip


def test_contract_is_importable_without_grpc(python: "Callable[..., CompletedProcess[str]]") -> None:
    """Adapters and engine use events, folds and errors where no gRPC is wanted; only rpc and status bring it."""
    modules = "dualclaw, dualclaw.events, dualclaw.fold, dualclaw.errors, dualclaw.rules"
    for extra, brings_it in (("", "False"), (", dualclaw.rpc", "True"), (", dualclaw.status", "True")):
        done = python("-c", f"import sys, {modules}{extra}; print('grpc' in sys.modules)")
        assert done.stdout.strip() == brings_it, done.stderr
