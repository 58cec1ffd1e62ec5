"""Checks of streams and of what their messages carry: S1, R1 to R12, W1 to W4."""

from typing import Final

from dualclaw_clients.conformance.check import Check, Target

_ALL: Final[tuple[Target, ...]] = ("engine", "native", "original")
_NUMBERED: Final[tuple[Target, ...]] = ("engine", "native")

RULES: Final = (
    Check(
        "S1",
        "The agent plays its scenarios",
        "Each scenario of the kit's agent ends as its table says, with the steps it names. Where one does not, either "
        "the agent is another one or the engine does not do what an agent asks; checks that build on it may fail too.",
        "4.5",
        "RunRequest.agent",
        _ALL,
        ("R2", "R3", "R4", "R5", "R6", "R7", "R11", "W2", "W3", "D1", "D2", "D3", "D4", "D6", "D7", "M1", "H10"),
    ),
    Check(
        "R1",
        "seq counts the events of a run",
        "The first event of a run has seq 1 and every later one is one more, over all its segments. Clients attach "
        "again by it: a gap or a repetition loses or doubles events.",
        "1.9",
        "EngineEvent.seq",
        _NUMBERED,
        ("R10", "A3", "D7", "W4", "F4"),
    ),
    Check(
        "R2",
        "A segment ends with exactly one terminal event",
        "What starts with Run, Resume or an answer ends with exactly one done or error, and nothing follows it until a "
        "later segment begins. Without it a client waits for ever; with two it shows an answer twice.",
        "1.9",
        "EngineEvent.done",
        _ALL,
        ("S1", "R3", "R5", "R6", "R7", "R11", "W4"),
    ),
    Check(
        "R3",
        "interrupt is followed at once by done with INTERRUPTED",
        "A run that waits for people says so by interrupt and then done with stop_reason INTERRUPTED; the next segment "
        "goes on with the seq and the step indexes.",
        "1.9",
        "Interrupt",
        _NUMBERED,
        ("S1", "R2", "D4"),
    ),
    Check(
        "R4",
        "A step starts once and ends once, under one index",
        "Every step has an index; it starts once, ends at most once, ok or fail, and none is open in a run that is "
        "final. A thinking step is one event without phase. A timeline would show steps twice, or spin for ever.",
        "1.9",
        "StepEvent.index",
        _NUMBERED,
        ("S1", "R6", "R7", "W2", "D1", "D2"),
    ),
    Check(
        "R5",
        "The folded text equals done.content",
        "The deltas of a segment, taken from its last rewind on, are the text that done says. An engine that trims or "
        "replaces text sends rewind first. Otherwise what people saw is not what is stored.",
        "1.9",
        "Done.content",
        _ALL,
        ("S1", "R11", "W4"),
    ),
    Check(
        "R6",
        "done.process_steps equals the folded steps",
        "The steps that done lists are those the run has told, in the order of their index, each as its last event "
        "said. A page that was opened later shows what done lists.",
        "1.9",
        "Done.process_steps",
        _ALL,
        ("S1", "W3"),
    ),
    Check(
        "R7",
        "used_skills and used_mcp name what was carried out",
        "They are the distinct names of the skill and mcp steps that ended ok, or failed after they had begun, in "
        "order of first start; not of calls that were refused before.",
        "1.9",
        "Done.used_skills",
        _ALL,
    ),
    Check(
        "R8",
        "trace_id and run_id are on every event",
        "trace_id is 32 hex digits and the same on all events of a segment; run_id is the same on all events of a run. "
        "By them a person finds the logs.",
        "1.9",
        "EngineEvent.trace_id",
        _NUMBERED,
    ),
    Check(
        "R9",
        "Arguments are canonical JSON",
        "args_json is empty, or the text Python's json.dumps(obj, ensure_ascii=False) prints of one object. Writers in "
        "every language copy it verbatim, so all of them put the same bytes on the wire.",
        "1.3",
        "Step.args_json",
        _NUMBERED,
        ("W3", "F2"),
    ),
    Check(
        "R10",
        "Every client gets exactly the events after its position",
        "A client that attaches after any seq gets all later events, the same as every other client, stored or live, "
        "also over a parked phase.",
        "1.9",
        "AttachRequest.after_seq",
        _NUMBERED,
        ("A1", "A2", "A3", "A4"),
    ),
    Check(
        "R11",
        "A failed run is an error event, a cancelled one a done",
        "A run that fails ends with error and its call with status OK; a cancelled one ends with done, stop_reason "
        "CANCELLED and the text so far. Any other status means that the stream was lost, and clients attach again.",
        "1.9",
        "StopReason",
        _NUMBERED,
        ("S1", "R2", "C1", "A4", "B2"),
    ),
    Check(
        "R12",
        "The same request_id gives the same events",
        "A Run or Resume that is sent again with its request_id streams that segment again, from its first event. So a "
        "client whose connection broke may simply ask again, and nothing is done twice.",
        "1.9",
        "RunRequest.request_id",
        _NUMBERED,
        ("E6", "E9", "H6"),
    ),
)

WIRE: Final = (
    Check(
        "W1",
        "Messages are messages of the contract",
        "Every response parses, has at least one event, and every enum has a value the contract knows.",
        "1.4",
        "RunResponse.events",
        implies=("R2", "R4", "R6", "S1"),
    ),
    Check(
        "W2",
        "Zero and unknown differ",
        "Fields with presence are sent when they are 0 (a step's index) and not sent when unknown (tokens of usage).",
        "1.3",
        "Usage.reasoning_tokens",
        implies=("R4", "R6"),
    ),
    Check(
        "W3",
        "Arguments arrive as they were called with",
        "Integers beyond 64 bits, floats, escapes, nesting and the order of keys are the same in step, process_steps "
        "and interrupt. A server that parses and prints them again changes numbers.",
        "1.3",
        "ToolCall.args_json",
        _ALL,
    ),
    Check(
        "W4",
        "A done names its message and its conversation",
        "message_id is the id under which ListMessages has the answer, conversation_id is that of the run, and "
        "Run.last_seq is the seq of the last event.",
        "1.3",
        "Done.message_id",
    ),
)
