"""What the kit tells: progress and a table for people, JUnit XML and JSON for machines."""

import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from dualclaw_clients.cli_render import safe, safe_line
from dualclaw_clients.command_line import installed_version
from dualclaw_clients.conformance.catalogue import implied_by
from dualclaw_clients.conformance.check import Check, Target
from dualclaw_clients.conformance.verdict import Outcome, Result, failed_ids

_STYLES: Final[Mapping[Outcome, str]] = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.NOT_CHECKED: "yellow",
}
LINE_EVERY: Final = 5.0
"""Seconds between two lines of progress where no terminal is, such as in the log of a CI job."""
_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found out about a server."""

    target: Target
    address: str
    agent: str
    results: tuple[Result, ...]
    seconds: float = 0.0
    """How long it took."""

    def count(self, outcome: Outcome) -> int:
        """Return how many checks had an outcome."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def summary(self) -> str:
        """How many passed, failed, and were not checked, in a line."""
        return ", ".join(f"{self.count(outcome)} {outcome.value}" for outcome in Outcome)

    def because_of(self, check: Check) -> Sequence[str]:
        """Return the failed checks that may be why this one failed."""
        return sorted(id_ for id_ in failed_ids(self.results) if check.id in implied_by([id_]))


class Screen:
    """Where people read: a table with progress on a terminal, plain lines elsewhere."""

    def __init__(self, out: TextIO, *, terminal: bool, line_every: float = LINE_EVERY) -> None:
        self._out = out
        self._console = Console(file=out, highlight=False) if terminal else None
        self._progress: Progress | None = None
        self._line_every = line_every
        self._next_line = time.monotonic() + line_every

    def begin(self, report_of: str) -> None:
        """Say what is being checked."""
        if self._console is None:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._progress.add_task(safe_line(report_of), total=None)
        self._progress.start()

    def played(self, scene: str, done: int, total: int) -> None:
        """Move the progress on."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, description=scene)
        elif self._console is None and (now := time.monotonic()) >= self._next_line:
            self._next_line = now + self._line_every
            self._out.write(f"{done} of {total} scenes played\n")
            self._out.flush()

    def stop(self) -> None:
        """End the progress."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def show(self, report: Report) -> None:
        """Tell every check, then what is wrong, then the sum."""
        self.stop()
        if self._console is not None:
            table = Table(box=None, pad_edge=False)
            for name in ("check", "outcome", "what has to be so"):
                table.add_column(name, no_wrap=name != "what has to be so")
            for result in report.results:
                title = result.check.title + (f" ({safe_line(result.why, 120)})" if result.why else "")
                table.add_row(result.check.id, Text(result.outcome.value, _STYLES[result.outcome]), Text(title))
            self._console.print(table)
        else:
            for result in report.results:
                why = f" ({safe_line(result.why, 200)})" if result.why else ""
                self._out.write(f"{result.outcome.value:12}{result.check.id:5}{result.check.title}{why}\n")
        for result in report.results:
            if result.outcome is Outcome.FAILED:
                self._line("", *_explained(report, result))
        self._line("", f"{report.target} at {safe_line(report.address)}: {report.summary}")

    def _line(self, *lines: str) -> None:
        for line in lines:
            self._out.write(f"{line}\n")


def _explained(report: Report, result: Result) -> Sequence[str]:
    check = result.check
    because = report.because_of(check)
    return [
        f"{check.id} {check.title}",
        f"  {check.text}",
        f"  Contract {check.section}, {check.place}."
        + (f" May be a consequence of {', '.join(because)}." if because else ""),
        *(f"  - {safe(fault)}" for fault in result.faults),
        *([f"  - and {result.more} more"] if result.more else []),
    ]


def listing(target: Target, checks: Sequence[Check]) -> str:
    """Return the checks of a target as text."""
    lines = [f"{len(checks)} checks of {target}:"]
    for check in checks:
        needs = f" (needs {check.needs})" if check.needs else ""
        lines += [f"{check.id:5}{check.title}{needs}", f"     {check.text} Contract {check.section}, {check.place}."]
    return "\n".join(lines) + "\n"


def as_markdown(checks: Sequence[Check]) -> str:
    """Return checks as the table of the documentation."""
    rows = ["| check | of | what has to be so | contract |", "| --- | --- | --- | --- |"]
    for check in checks:
        of = "all" if len(check.targets) == 3 else ", ".join(check.targets)
        needs = f" Needs `{check.needs}`." if check.needs else ""
        rows.append(
            f"| {check.id} | {of} | **{check.title}.** {check.text}{needs} | {check.section}, `{check.place}` |"
        )
    return "\n".join(rows) + "\n"


def as_json(report: Report) -> str:
    """Return a report as one JSON object."""
    checks = [
        {
            "id": result.check.id,
            "title": result.check.title,
            "outcome": result.outcome.name.lower(),
            "faults": list(result.faults),
            "more_faults": result.more,
            "why": result.why,
            "contract": result.check.section,
            "place": result.check.place,
            "may_be_because_of": list(report.because_of(result.check)) if result.faults else [],
        }
        for result in report.results
    ]
    summary = {outcome.name.lower(): report.count(outcome) for outcome in Outcome}
    head: dict[str, object] = {
        "target": report.target,
        "address": report.address,
        "agent": report.agent,
        "version": installed_version(),
    }
    head["seconds"] = round(report.seconds, 3)
    return json.dumps({**head, "summary": summary, "checks": checks}, ensure_ascii=False, indent=2) + "\n"


def as_junit(report: Report) -> str:
    """Return a report as JUnit XML: one test case for each check."""
    counts = {
        "tests": len(report.results),
        "failures": report.count(Outcome.FAILED),
        "skipped": report.count(Outcome.NOT_CHECKED),
        "errors": 0,
    }
    suite = ET.Element("testsuite", name=f"dualclaw conformance {report.target}", hostname=_xml(report.address))
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    suite.set("time", f"{report.seconds:.3f}")
    for result in report.results:
        name = f"{result.check.id} {result.check.title}"
        case = ET.SubElement(suite, "testcase", classname=f"dualclaw.conformance.{report.target}", name=name)
        if result.outcome is Outcome.FAILED:
            failure = ET.SubElement(case, "failure", type=result.check.id, message=_xml(result.faults[0][:500]))
            failure.text = _xml("\n".join(_explained(report, result)))
        elif result.outcome is Outcome.NOT_CHECKED:
            ET.SubElement(case, "skipped", message=_xml(result.why))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
