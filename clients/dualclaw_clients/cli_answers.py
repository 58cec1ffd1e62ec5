"""Answers to what a run asks people: from options of the command line, or from the person at the terminal.

- An answer means what its giver has seen. At the terminal it carries the hash of the arguments that were shown,
  and what was typed before a question is thrown away: it was meant for something else.
- Nothing is answered by a slip: an empty line, or the end of input, leaves a question open.
- A person may take as long as they want. Who was faster in another channel is told, and the run is followed.

AnswerUsage
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import tempfile
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualclaw import Decision, DecisionAction, InterruptItem, InterruptKind, ResumeRequest, Run, RunState
from dualclaw.errors import EngineError
from dualclaw.json_text import clean_text
from dualclaw_clients.adapters.responses import response_json_of
from dualclaw_clients.cli_parser import ACTIONS, SCOPES
from dualclaw_clients.cli_render import Terminal, question_lines, safe_json, safe_line, short_name

_APPROVE = DecisionAction.DECISION_ACTION_APPROVE
_REJECT = DecisionAction.DECISION_ACTION_REJECT
_EDIT = DecisionAction.DECISION_ACTION_EDIT
_SKIP = DecisionAction.DECISION_ACTION_SKIP
_RESPOND = DecisionAction.DECISION_ACTION_RESPOND
_KEYS: Mapping[str, DecisionAction.ValueType] = {"a": _APPROVE, "r": _REJECT, "e": _EDIT, "s": _SKIP, "w": _RESPOND}
_IN_EDITOR = "/edit"
_OFFERS = {
    _APPROVE: "[a]pprove",
    _REJECT: "[r]eject",
    _EDIT: "[e]dit",
    _SKIP: "[s]kip",
    _RESPOND: "[w]rite the result yourself",
}


class AnswerUsage(Exception):
    """The options fit none of the open questions, or several; ``lines`` say which there are."""

    def __init__(self, problem: str, lines: Sequence[str]) -> None:
        super().__init__(problem)
        self.lines = lines


def decisions_for(run: Run, template: Decision, *, answer_all: bool) -> list[Decision]:
    """Return the answers to the open questions that an action without ids means.

    Raises:
        EngineError: RUN_NOT_INTERRUPTED.
        AnswerUsage: no question takes the action, or several do and not all are meant.
    """
    action, name = template.action, short_name(DecisionAction.Name, template.action, "DECISION_ACTION_")
    if run.state != RunState.RUN_STATE_INTERRUPTED or not run.interrupts:
        state = short_name(RunState.Name, run.state, "RUN_STATE_")
        raise EngineError("RUN_NOT_INTERRUPTED", f"run {run.id} waits for no answer, it is {state}")
    fitting = [item for item in run.interrupts if action in item.allowed_actions or not item.allowed_actions]
    lines = [line for item in run.interrupts for line in question_lines(item, run.id)]
    if not fitting:
        raise AnswerUsage(f"no open question can be answered by {name}", lines)
    if len(fitting) > 1 and (action == _EDIT or not answer_all):
        what = "edit answers one question: name it by --id" if action == _EDIT else "name one by --id, or use --all"
        raise AnswerUsage(f"{len(fitting)} open questions take {name}: {what}", lines)
    return [_of(template, item.id, item.args_hash) for item in fitting]


def decision_template(
    action: str, *, args: str | None, response: str | None, response_json: str | None, comment: str, remember: str
) -> Decision:
    """Return the decision that options make, without the question it answers."""
    decision = Decision(action=ACTIONS[action], comment=comment)
    if args is not None:
        decision.args_json = args
    if response is not None:
        decision.response_json = safe_json(response)
    if response_json is not None:
        decision.response_json = response_json
    if remember:
        decision.remember = SCOPES[remember]
    return decision


def _of(template: Decision, interrupt_id: str, args_hash: str) -> Decision:
    decision = Decision()
    decision.CopyFrom(template)
    decision.interrupt_id, decision.args_hash = interrupt_id, args_hash
    return decision


def decisions_by_id(ids: Sequence[str], template: Decision) -> list[Decision]:
    """Return the answers to questions named by their ids."""
    return [_of(template, interrupt_id, "") for interrupt_id in dict.fromkeys(ids)]


class Person:
    """The person at the terminal.

    Args:
        terminal: where questions are shown.
        fd: the terminal they type on.
        editor: command of their text editor, for arguments that are longer than a line; empty: none.
    """

    def __init__(self, terminal: Terminal, fd: int, editor: str = "") -> None:
        self._terminal = terminal
        self._fd = fd
        self._editor = editor

    async def answers(self, run_id: str, items: Sequence[InterruptItem]) -> ResumeRequest:
        """Ask every question; those that are left open have no decision."""
        request = ResumeRequest(run_id=run_id)
        for number, item in enumerate(items, 1):
            if len(items) > 1:
                what = f"{safe_line(item.tool_name)}: " if item.tool_name else ""
                self._terminal.line(f"({number} of {len(items)}) {what}{safe_line(item.prompt)}", "bold")
            decision = await self._answer(item)
            if decision is not None:
                request.decisions.append(decision)
        return request

    async def _answer(self, item: InterruptItem) -> Decision | None:
        allowed = [action for action in _OFFERS if action in item.allowed_actions]
        decision = Decision(interrupt_id=item.id, args_hash=item.args_hash)
        if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION and _RESPOND in allowed:
            skip = ", /skip to leave it unanswered" if _SKIP in allowed else ""
            text = await self._line(f"your answer (empty: later{skip}): ")
            if not text:
                return None
            if skip and text.strip() == "/skip":
                decision.action = _SKIP
            else:
                decision.action, decision.response_json = _RESPOND, response_json_of(text, item.response_schema_json)
            return decision
        while True:
            word = (await self._line(f"{' '.join(_OFFERS[action] for action in allowed)} (empty: later): ")).strip()
            if not word:
                return None
            action = _KEYS.get(word.lower(), ACTIONS.get(word.lower()))
            if action in allowed and await self._complete(decision, action, item):
                return decision

    async def _complete(self, decision: Decision, action: DecisionAction.ValueType, item: InterruptItem) -> bool:
        """Ask for what an action needs beside itself; False when the person thinks better of it."""
        decision.action = action
        if action == _EDIT:
            args = await self._new_arguments(item.args_json)
            decision.args_json = args
            return bool(args)
        if action == _RESPOND:
            text = await self._line("the result (empty: back): ")
            decision.response_json = response_json_of(text, item.response_schema_json)
            return bool(text)
        if action == _REJECT:
            decision.comment = await self._line("why (may be empty): ")
        return True

    async def _new_arguments(self, args_json: str) -> str:
        offer = f", {_IN_EDITOR}: in your editor" if self._editor else ""
        while True:
            text = await self._line(f"the new arguments as one JSON object (empty: back{offer}): ")
            if offer and text.strip() == _IN_EDITOR:
                text = args_json = await self._edited(args_json)
            problem = "" if not text.strip() else args_problem(text)
            if not problem:
                return text.strip()
            self._terminal.line(problem, "red")

    async def _edited(self, args_json: str) -> str:
        """Have the person edit arguments in their editor; empty when it cannot be started or fails."""
        with contextlib.suppress(ValueError, RecursionError):
            args_json = json.dumps(json.loads(args_json or "{}"), ensure_ascii=False, indent=2)
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="dualclaw-")
        file, process = Path(folder, "arguments.json"), None
        try:
            await asyncio.to_thread(file.write_text, args_json + "\n", "utf-8")
            process = await asyncio.create_subprocess_exec(*shlex.split(self._editor), str(file))
            code = await process.wait()  # a person may take as long as they want
            if code == 0:
                return clean_text(await asyncio.to_thread(file.read_text, "utf-8", "replace"))
            problem = f"the editor ended with exit code {code}"
        except (OSError, ValueError) as error:
            problem = f"the editor cannot be used: {error}"
        finally:
            if process is not None and process.returncode is None:
                process.terminate()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._terminal.line(problem, "red")
        return ""

    async def _line(self, prompt: str) -> str:
        """Return the next line; empty at the end of input."""
        termios.tcflush(self._fd, termios.TCIFLUSH)
        self._terminal.prompt(prompt)
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)
        data = os.read(self._fd, 1 << 16)  # a terminal hands over one line
        if not data.endswith(b"\n"):
            self._terminal.line("")
        return clean_text(data.decode("utf-8", "replace").rstrip("\r\n"))


def args_problem(text: str) -> str:
    """Return why a text is not the arguments of a call; empty if it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"this is not JSON: {error}"
    return "" if isinstance(value, dict) else "this is JSON, but not one object such as {}"
