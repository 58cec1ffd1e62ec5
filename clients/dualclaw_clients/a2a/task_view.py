"""A run as an A2A task: what each event of the engine changes in it, and the task as it stands. Pure.

- The answer of each segment is one artifact, ``answer-N`` with N the seq of the segment's first event: the same for
  every reader and after a crash. Deltas append to it; a rewind replaces it whole (``append`` false), and so does a
  ``done`` whose content differs from what was sent. The last chunk is marked, empty if nothing was held back for it:
  holding back would delay every word.
- Steps are status updates of a working task: which tool began or ended. Their arguments and results stay here, as does
  reasoning: the other side asked for an answer, not for a look inside.
- ``interrupt`` is remembered and told by the ``done`` behind it, so input-required comes once, with every question.
- An event that was seen changes nothing, so a log may be folded first and a stream of the same run behind it.
"""

from collections.abc import Iterable, Sequence

from a2a.types.a2a_pb2 import (
    TASK_STATE_CANCELED,
    TASK_STATE_COMPLETED,
    TASK_STATE_FAILED,
    TASK_STATE_INPUT_REQUIRED,
    TASK_STATE_SUBMITTED,
    TASK_STATE_WORKING,
    Artifact,
    Part,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from google.protobuf.timestamp_pb2 import Timestamp

from dualclaw import (
    Diagnosis,
    Done,
    EngineEvent,
    Error,
    InterruptItem,
    Phase,
    Run,
    RunState,
    Step,
    StepKind,
    StopReason,
)
from dualclaw.diagnosis import diagnosis_to_dict
from dualclaw_clients.a2a.parts import agent_message, data_part, text_part
from dualclaw_clients.a2a.questions import question_parts

Update = TaskStatusUpdateEvent | TaskArtifactUpdateEvent

STATES: dict[int, TaskState] = {
    RunState.RUN_STATE_QUEUED: TASK_STATE_SUBMITTED,
    RunState.RUN_STATE_RUNNING: TASK_STATE_WORKING,
    RunState.RUN_STATE_INTERRUPTED: TASK_STATE_INPUT_REQUIRED,
    RunState.RUN_STATE_SUCCEEDED: TASK_STATE_COMPLETED,
    RunState.RUN_STATE_FAILED: TASK_STATE_FAILED,
    RunState.RUN_STATE_CANCELLED: TASK_STATE_CANCELED,
}
FINAL = frozenset({TASK_STATE_COMPLETED, TASK_STATE_FAILED, TASK_STATE_CANCELED})
WAITS = frozenset({TASK_STATE_INPUT_REQUIRED})


def is_final(run: Run) -> bool:
    """Return whether a run is at its end."""
    return STATES.get(run.state, TASK_STATE_WORKING) in FINAL


class TaskView:
    """One run's task, grown event by event."""

    def __init__(self, run_id: str, context_id: str) -> None:
        self.run_id = run_id
        self.context_id = context_id
        self.last_seq = 0
        """Seq of the newest event applied."""
        self.status = TaskStatus(state=TASK_STATE_SUBMITTED)
        self.asked: Sequence[InterruptItem] = ()
        """The questions asked last."""
        self.ever_asked: set[str] = set()
        """Ids of everything the task has ever asked."""
        self._answers: dict[str, list[str]] = {}
        self._answer = ""

    @property
    def is_open(self) -> bool:
        """Whether more comes without anybody's doing."""
        return self.status.state not in FINAL | WAITS

    def task(self) -> Task:
        """Return the task as it stands."""
        artifacts = [_artifact(name, "".join(pieces)) for name, pieces in self._answers.items()]
        return Task(id=self.run_id, context_id=self.context_id, status=self.status, artifacts=artifacts)

    def apply(self, event: EngineEvent) -> list[Update]:
        """Take an event; returns what it changes, in order."""
        if event.seq <= self.last_seq:
            return []
        updates: list[Update] = []
        if self._answer == "" or not self.is_open:
            self._answer = f"answer-{event.seq}"
            updates.append(self._status(TASK_STATE_WORKING))
        self.last_seq = event.seq
        match event.WhichOneof("payload"):
            case "delta":
                updates += self._append(event.delta.content)
            case "rewind":
                updates += self._replace(event.rewind.content)
            case "step":
                updates += self._step(event.step.step)
            case "interrupt":
                self.asked = tuple(event.interrupt.items)
                self.ever_asked |= {item.id for item in self.asked}
            case "done":
                updates += self._done(event.done, event.trace_id)
            case "error":
                updates += self._last_chunk("")
                parts = failure_parts(event.error)
                updates.append(self._status(TASK_STATE_FAILED, parts, trace_id=event.trace_id))
            case _:
                pass  # reasoning, and what is newer than this code
        return updates

    def ask_again(self, items: Sequence[InterruptItem], problem: str) -> Task:
        """Return the task with its open questions and what was wrong with an answer; changes nothing."""
        task = self.task()
        message = agent_message(
            self.run_id, self.context_id, f"{self.run_id}-{self.last_seq}-again", question_parts(items, problem)
        )
        task.status.CopyFrom(TaskStatus(state=TASK_STATE_INPUT_REQUIRED, message=message, timestamp=_now()))
        return task

    def goes_on(self) -> Task:
        """Return the task once its questions have been answered, before the next segment's first event."""
        self._status(TASK_STATE_WORKING)
        self._answer = ""
        return self.task()

    def _append(self, text: str) -> list[Update]:
        if not text:
            return []
        pieces = self._answers.get(self._answer)
        if pieces is None:
            self._answers[self._answer] = [text]
            return [self._artifact_update(text, append=False)]
        pieces.append(text)
        return [self._artifact_update(text, append=True)]

    def _replace(self, text: str) -> list[Update]:
        if text == "".join(self._answers.get(self._answer, ())):
            return []
        self._answers[self._answer] = [text]
        return [self._artifact_update(text, append=False)]

    def _last_chunk(self, content: str) -> list[Update]:
        if content and content != "".join(self._answers.get(self._answer, ())):
            self._answers[self._answer] = [content]
            return [self._artifact_update(content, append=False, last=True)]
        if self._answer in self._answers:
            return [self._artifact_update("", append=True, last=True)]
        return []

    def _done(self, done: Done, trace_id: str) -> list[Update]:
        updates = self._last_chunk(done.content)
        reason = done.stop_reason
        if reason == StopReason.STOP_REASON_INTERRUPTED:
            parts = question_parts(self.asked)
            return [*updates, self._status(TASK_STATE_INPUT_REQUIRED, parts, trace_id=trace_id)]
        state = TASK_STATE_CANCELED if reason == StopReason.STOP_REASON_CANCELLED else TASK_STATE_COMPLETED
        return [*updates, self._status(state, stop_reason=stop_reason_name(reason), trace_id=trace_id)]

    def _step(self, step: Step) -> list[Update]:
        if step.kind in (StepKind.STEP_KIND_THINKING, StepKind.STEP_KIND_UNSPECIFIED) or not step.name:
            return []
        phase = Phase.Name(step.phase).removeprefix("PHASE_").lower() if step.phase in Phase.values() else ""
        kind = StepKind.Name(step.kind).removeprefix("STEP_KIND_").lower() if step.kind in StepKind.values() else ""
        words = {"start": "started", "ok": "done", "fail": "failed"}.get(phase)
        if phase == "start" and step.diagnosis.code in ("approval.required", "input.required"):
            words = "waits for an answer"
        if words is None:
            return []
        parts = [text_part(f"{step.name}: {words}")]
        return [self._status(TASK_STATE_WORKING, parts, step={"name": step.name, "kind": kind, "phase": phase})]

    def _status(
        self, state: TaskState, parts: Sequence[Part] = (), **about: str | dict[str, str]
    ) -> TaskStatusUpdateEvent:
        status = TaskStatus(state=state, timestamp=_now())
        if parts:
            name = f"{self.run_id}-{self.last_seq}"
            status.message.CopyFrom(agent_message(self.run_id, self.context_id, name, parts))
        self.status = status
        update = TaskStatusUpdateEvent(task_id=self.run_id, context_id=self.context_id, status=status)
        if known := {name: value for name, value in about.items() if value}:
            update.metadata.update({"dualclaw": known})
        return update

    def _artifact_update(self, text: str, *, append: bool, last: bool = False) -> TaskArtifactUpdateEvent:
        return TaskArtifactUpdateEvent(
            task_id=self.run_id,
            context_id=self.context_id,
            artifact=_artifact(self._answer, text),
            append=append,
            last_chunk=last,
        )


def merged(updates: Iterable[Update]) -> list[Update]:
    """Return updates with neighbouring chunks of one artifact as one: what came together goes out together."""
    found: list[Update] = []
    pieces: list[str] = []

    def close() -> None:
        if pieces and isinstance(found[-1], TaskArtifactUpdateEvent):
            found[-1].artifact.parts[0].text = "".join(pieces)
        pieces.clear()

    for update in updates:
        if isinstance(update, TaskArtifactUpdateEvent):
            name, text = update.artifact.artifact_id, update.artifact.parts[0].text
            before = found[-1] if found else None
            if isinstance(before, TaskArtifactUpdateEvent) and update.append and before.artifact.artifact_id == name:
                pieces.append(text)
                before.last_chunk = update.last_chunk
                continue
            close()
            pieces.append(text)
        else:
            close()
        found.append(update)
    close()
    return found


def task_of(run: Run, answers: Task | None = None) -> Task:
    """Return a run as a task; ``answers``: a folded one whose artifacts it gets."""
    task = Task(id=run.id, context_id=run.conversation_id)
    task.status.state = STATES.get(run.state, TASK_STATE_WORKING)
    if run.HasField("update_time"):
        task.status.timestamp.CopyFrom(run.update_time)
    parts: list[Part] = []
    if run.interrupts:
        parts = question_parts(run.interrupts)
    elif run.HasField("error"):
        parts = failure_parts(run.error)
    if parts:
        name = f"{run.id}-{run.last_seq}"
        task.status.message.CopyFrom(agent_message(run.id, run.conversation_id, name, parts))
    if answers is not None:
        task.artifacts.extend(answers.artifacts)
    about = {"agent": run.agent, "claw": run.claw, "stop_reason": stop_reason_name(run.stop_reason)}
    task.metadata.update({"dualclaw": {name: value for name, value in about.items() if value}})
    return task


def failure_parts(error: Error) -> list[Part]:
    """Return what is said of a failed run: a text, and its diagnosis as data."""
    parts = [text_part(error.message or error.diagnosis.summary or "The agent failed.")]
    if error.diagnosis != Diagnosis():
        parts.append(data_part({"diagnosis": diagnosis_to_dict(error.diagnosis)}))
    return parts


def stop_reason_name(reason: int) -> str:
    """Return a stop reason's lower-case name; "" for none and for one newer than this code."""
    if not reason or reason not in StopReason.values():
        return ""
    return StopReason.Name(reason).removeprefix("STOP_REASON_").lower()  # type: ignore[arg-type]  # checked above


def _artifact(name: str, text: str) -> Artifact:
    return Artifact(artifact_id=name, name="answer", parts=[text_part(text)])


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    return now
