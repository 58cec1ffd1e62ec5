"""What a stream of events looks like in a terminal, or as plain text in a pipe.

- The answer goes to stdout and nothing else does, so that a pipe gets the answer. Reasoning, steps, questions
  and notes go to stderr. Where both are the same screen, a line begun by one is ended before the other writes.
- Text that is on the screen cannot be taken back: after a rewind to something else, a line on stdout says that
  the answer is restarted, and the right text follows. A rewind to what is there already says nothing.
- Models, tools and people write names and texts. A control character in one could move the cursor, clear the
  screen or rename the window, and a direction mark could show a command as another one: all of them are made
  visible, except newline and tab.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualclaw import (
    DecisionAction,
    Diagnosis,
    EngineEvent,
    InterruptItem,
    InterruptKind,
    Phase,
    Severity,
    Step,
    StepKind,
    StopReason,
)
from dualclaw.events import to_wire
from dualclaw.fold import RunView
from dualclaw_clients.adapters.questions import visible

_Number = TypeVar("_Number", bound=int)
MAX_ARGS = 300
MAX_RESULT = 600
RESTARTED = "[the answer is restarted]"

_ASKING = ("approval.required", "input.required")
"""Codes of a step that waits for people; the interrupt that follows says it better."""
_NEEDS = {"edit": " --args JSON", "respond": " --response TEXT"}

# C0 but tab and newline, DEL, C1; marks, overrides and isolates of text direction; line and paragraph separators.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def safe(text: str) -> str:
    """Return text with every control character made visible, except newline and tab."""
    return _UNSAFE.sub(_visible, text.replace("\r\n", "\n"))


def safe_line(text: str, limit: int = 0) -> str:
    """Return text safe and on one line; cut to ``limit`` characters if one is given."""
    line = safe(" ".join(text.split()))
    return line if not limit or len(line) <= limit else line[: limit - 1] + "…"


def safe_args(args_json: str) -> str:
    """Return the arguments of a call that somebody has to judge: on one line, every space and hidden sign as it is."""
    return safe(visible(args_json or "{}")).replace("\n", "\u240a").replace("\t", "\u2409")


def time_text(moment: Timestamp) -> str:
    """Return a moment as text, "" for none; where a clock went wrong it may be out of the range of dates."""
    if not moment.seconds:
        return ""
    try:
        return datetime.fromtimestamp(moment.seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{moment.seconds} s after 1970"


def safe_json(value: object) -> str:
    """Return a value as one line of JSON whose control characters are all escaped; the value stays the same."""
    text = json.dumps(value, ensure_ascii=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def short_name(name: Callable[[_Number], str], number: _Number, prefix: str) -> str:
    """Return an enum value's name without its prefix, in lower case; "" for unspecified, its number if unknown."""
    try:
        found = name(number).removeprefix(prefix).lower()
    except ValueError:  # newer than this program
        return str(number)
    return "" if found == "unspecified" else found


def _finding(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as lines: the summary, what it leaves out, what to do; "" for none."""
    summary = safe(diagnosis.summary)
    lines = [summary]
    if (detail := safe(diagnosis.detail).strip()) and detail not in summary:
        lines.append(textwrap.indent(detail, "  "))
    if diagnosis.hint:
        lines.append(textwrap.indent(f"hint: {safe(diagnosis.hint)}", "  "))
    return "\n".join(lines).strip()


def question_lines(item: InterruptItem, run_id: str) -> list[str]:
    """Return what a run asks, the answers it takes, and the command that gives one."""
    what = "approval" if item.kind == InterruptKind.INTERRUPT_KIND_APPROVAL else "question"
    subject = f" of {safe_line(item.tool_name)} {safe_args(item.args_json)}" if item.tool_name else ""
    prompt = safe(item.prompt).replace("\n", "\n  | ")
    lines = [f"? {what}{subject}: {prompt}", f"  id:      {safe_line(item.id)}"]
    names = [short_name(DecisionAction.Name, action, "DECISION_ACTION_") for action in item.allowed_actions]
    answers = [f"{name}{_NEEDS.get(name, '')}" for name in names if name]
    if answers:
        lines.append(f"  answers: {' | '.join(answers)}")
    if item.response_schema_json:
        lines.append(f"  schema:  {safe_line(item.response_schema_json)}")
    if item.HasField("expire_time"):
        lines.append(f"  expires: {time_text(item.expire_time)}")
    first = answers[0] if answers else "ACTION"
    command = f"dualclaw resume {shlex.quote(safe_line(run_id))} {first} --id {shlex.quote(safe_line(item.id))}"
    return [*lines, f"  answer:  {command}"]


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


class Terminal:
    """Two streams that may be one screen; keeps the lines of one apart from those of the other."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._styled = Console(file=err, highlight=False, markup=False) if err.isatty() else None
        self._one_screen = out.isatty() and err.isatty()
        self._open: dict[str, bool] = {"out": False, "err": False}

    def answer(self, text: str) -> None:
        """Write a piece of the answer: on a screen made safe, into a pipe or file exactly as it is."""
        if text:
            self._leave("err")
            self._out.write(safe(text) if self._out.isatty() else text)
            self._out.flush()
            self._open["out"] = not text.endswith("\n")

    def aside(self, text: str) -> None:
        """Write a piece of something said beside the answer, dimmed."""
        if text:
            self._leave("out")
            self._note(text, "dim")
            self._open["err"] = not text.endswith("\n")

    def line(self, text: str, style: str = "") -> None:
        """Write a line of its own beside the answer."""
        self._leave("out")
        if self._open["err"]:
            self._note("\n", "")
        self._note(text + "\n", style)
        self._open["err"] = False

    def prompt(self, text: str) -> None:
        """Write what a person is asked beside the answer; what they type ends the line."""
        self.line("") if self._open["err"] else self._leave("out")
        self._note(text, "bold")

    def end_answer(self) -> None:
        """End the answer's last line if it is open."""
        if self._open["out"]:
            self.answer("\n")

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Show rows on stdout: a table with headings for people; for a pipe a line each, with tabs between columns."""
        if not self._out.isatty():
            for row in rows:
                self._out.write("\t".join(safe_line(cell) for cell in row) + "\n")
        else:
            # On a screen a column that says nothing is in the way; a pipe needs each at its place.
            shown = [n for n in range(len(columns)) if not rows or any(row[n] for row in rows)]
            found = Table(title=title or None, title_justify="left")
            for n in shown:
                found.add_column(columns[n], overflow="fold")
            for row in rows:
                found.add_row(*(Text(safe_line(row[n])) for n in shown))
            Console(file=self._out, highlight=False, markup=False).print(found)
        self._out.flush()

    def print(self, text: str) -> None:
        """Write a line on stdout."""
        self.answer(text + "\n")

    def _leave(self, name: str) -> None:
        if self._one_screen and self._open[name]:
            (self._out if name == "out" else self._err).write("\n")
            self._open[name] = False

    def _note(self, text: str, style: str) -> None:
        if self._styled is not None and style:
            self._styled.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            self._err.write(text)
        self._err.flush()


def show_question(item: InterruptItem, run_id: str, terminal: Terminal, *, brief: bool = False) -> None:
    """Show what a run asks beside the answer; ``brief`` leaves out how to answer."""
    asked, *rest = question_lines(item, run_id)
    terminal.line(asked, "bold yellow")
    for line in () if brief else rest:
        terminal.line(line)


class EventPrinter:
    """Shows the events of a run; ``stop_reason`` and ``failed`` tell how its last segment ended.

    Args:
        from_start: False: the events before the first one shown are not known.
        asks: True: questions are asked of the person right after, so how else to answer is left out.
    """

    def __init__(self, terminal: Terminal, *, as_json: bool, from_start: bool = True, asks: bool = False) -> None:
        self._terminal = terminal
        self._asks = asks
        self._json = as_json
        self._view = RunView()
        self._shown = ""
        self._partial = not from_start
        self._reasoned = False
        self._unknown = 0
        self.stop_reason = StopReason.STOP_REASON_UNSPECIFIED
        self.failed = False

    def show(self, event: EngineEvent) -> None:
        """Show the next event."""
        first_of_segment = self._view.terminal is not None
        self._view.apply(event)
        if first_of_segment:
            self._shown, self._partial = "", False
        if event.HasField("done") or event.HasField("error"):
            self.failed = event.HasField("error")
            self.stop_reason = event.done.stop_reason
        if self._json:
            self._show_json(event)
        else:
            self._show_text(event)

    @property
    def questions(self) -> tuple[InterruptItem, ...]:
        """What the run asks people, if its last segment ended so."""
        return self._view.interrupts

    def finish(self, run_id: str, conversation_id: str) -> None:
        """Write the closing line: where the conversation goes on and how the run ended."""
        self._terminal.end_answer()
        if self._unknown:
            self._terminal.line(f"{self._unknown} events are newer than this program and were not shown", "yellow")
        terminal = self._view.terminal
        if terminal is None:
            return
        parts = [f"conversation {safe_line(terminal.done.conversation_id or conversation_id or 'unknown')}"]
        parts.append(f"run {safe_line(terminal.run_id or run_id)}")
        parts.append(
            "failed" if self.failed else short_name(StopReason.Name, self.stop_reason, "STOP_REASON_") or "done"
        )
        usage = terminal.done.usage
        if usage.HasField("input_tokens") or usage.HasField("output_tokens"):
            parts.append(f"{usage.input_tokens} tokens in, {usage.output_tokens} out")
        if terminal.done.generating:
            parts.append("media is still being made")
        self._terminal.line(" · ".join(parts), "dim")

    def _show_json(self, event: EngineEvent) -> None:
        wire = to_wire(event)
        if wire is None:
            self._unknown += 1
        else:
            self._terminal.print(safe_json(wire))

    def _show_text(self, event: EngineEvent) -> None:
        match event.WhichOneof("payload"):
            case "delta":
                self._say(event.delta.content)
            case "reasoning":
                self._reasoned = True
                self._terminal.aside(safe(event.reasoning.content))
            case "step":
                self._step(event.step.step)
            case "rewind":
                self._partial = False
                self._become(event.rewind.content)
            case "interrupt":
                self._terminal.end_answer()
                for item in event.interrupt.items:
                    show_question(item, event.run_id, self._terminal, brief=self._asks)
            case "done":
                # Who attached in the middle has the end of the text only, and that is right as it is.
                if not (self._partial and event.done.content.endswith(self._shown)):
                    self._become(event.done.content)
                self._terminal.end_answer()
            case "error":
                self._terminal.end_answer()
                diagnosis = event.error.diagnosis if event.error.HasField("diagnosis") else Diagnosis()
                self._terminal.line(f"✗ {_finding(diagnosis) or safe(event.error.message)}", "red")
            case None:
                self._unknown += 1

    def _say(self, text: str) -> None:
        self._shown += text
        self._terminal.answer(text)

    def _become(self, text: str) -> None:
        """Make the text of the segment read as given, by going on where it fits and by starting anew elsewhere."""
        if text.startswith(self._shown):
            self._say(text[len(self._shown) :])
            return
        self._terminal.end_answer()
        self._terminal.print(RESTARTED)
        self._shown = ""
        self._say(text)

    def _step(self, step: Step) -> None:
        if step.kind == StepKind.STEP_KIND_THINKING:
            if not self._reasoned:
                self._terminal.line(safe(step.text), "dim")
            self._reasoned = False
            return
        name = safe_line(f"{step.server}/{step.name}" if step.server else step.name, 100)
        kind = short_name(StepKind.Name, step.kind, "STEP_KIND_")
        trouble = ""
        loud = step.diagnosis.severity in {Severity.SEVERITY_WARNING, Severity.SEVERITY_ERROR}
        if loud and step.diagnosis.code not in _ASKING:
            trouble = _finding(step.diagnosis)
        match step.phase:
            case Phase.PHASE_OK:
                self._terminal.line(f"✓ {name}: {safe_line(step.result, MAX_RESULT)}", "green")
            case Phase.PHASE_FAIL:
                text = trouble or safe_line(step.result, MAX_RESULT)
                named = step.name and re.search(rf"(?<!\w){re.escape(safe_line(step.name))}(?!\w)", text)
                self._terminal.line(f"✗ {text if named and not step.server else f'{name}: {text}'}", "red")
                trouble = ""
            case _:
                self._terminal.line(f"▸ {kind} {name} {safe_line(step.args_json or '{}', MAX_ARGS)}", "cyan")
        if trouble:
            self._terminal.line(f"! {trouble}", "yellow")
