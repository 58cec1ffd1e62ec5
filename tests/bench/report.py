"""What was measured, as a table for the terminal and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.bench import machine
from tests.bench.frameworks import PEERS, versions
from tests.bench.plan import Case, Plan, Report, Row
from tests.bench.ratios import Ratio

COLOURS: Mapping[str, str] = {"met": "green", "not met": "red", "too noisy": "yellow", "not measured": "magenta"}

Results = Sequence[tuple[Row, Report]]


def number(value: float) -> str:
    """Return a figure as people read it: three digits that count."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def interval(ratio: Ratio, sign: str = "x") -> str:
    """Return a ratio with its interval."""
    return f"{number(ratio.value)}{sign} [{number(ratio.low)} .. {number(ratio.high)}]"


def floor_line(case: Case) -> str:
    """Return what the floor of a case says; empty when there is none."""
    if case.floor is None:
        return ""
    floor = case.floor
    best = f"{interval(floor.to_theirs, '')} of {case.against}"
    if case.goal.verdict(floor.to_theirs) == "not met":
        best += ", which misses the goal too"
    ours = interval(floor.ours, " times")
    return f"{case.label}, floor: {number(floor.value)} {case.unit} ({best}); ours is {ours} the floor"


def show(console: Console, results: Results, missing: Mapping[str, str]) -> None:
    """Print the table, what is to be known beside it, and whether the machine was quiet enough."""
    table = Table(box=box.SIMPLE_HEAD, title="ratio: ours to theirs, median of pairs with its 95 % interval")
    for name in ("#", "what", "ours", "theirs", "ratio", "goal", "verdict"):
        table.add_column(name, justify="right" if name in ("#", "ours", "theirs", "ratio") else "left")
    for row, report in results:
        _add(table, row, report)
    console.print(table)
    for row, report in results:
        floors = filter(None, map(floor_line, report.cases))
        for note in dict.fromkeys([*report.notes, *floors]):
            console.print(Text(f"  {row.number}: {note}", style="dim"))
    for name, reason in missing.items():
        console.print(Text(f"  {name} is missing from every comparison: {reason}", style="magenta"))
    console.print(Text(verdict_on_machine(results)))


def _add(table: Table, row: Row, report: Report) -> None:
    state = Text(report.verdict, style=COLOURS[report.verdict])
    if report.noise is not None and not report.noise.quiet:
        state.append(" (busy machine)", style="yellow")
    table.add_row(str(row.number), Text(row.title, style="bold"), "", "", "", "", state)
    for case in report.cases:
        table.add_row(
            "", Text(f"  {case.label}, vs {case.against}"), f"{number(case.ours)} {case.unit}",
            f"{number(case.theirs)} {case.unit}", interval(case.ratio), str(case.goal),
            Text(case.verdict, style=COLOURS[case.verdict]),
        )  # fmt: skip
    if report.failure:
        table.add_row("", Text(f"  {report.failure}", style="magenta"), "", "", "", "", "")


def verdict_on_machine(results: Results) -> str:
    """Say whether the figures may be quoted."""
    busy = [(row, report.noise) for row, report in results if report.noise is not None and not report.noise.quiet]
    if not busy:
        return "The machine was quiet."
    rows = "; ".join(f"row {row.number}: {noise}" for row, noise in busy)
    return f"The machine was too noisy for these figures to be quoted, measure again on a quiet one ({rows})."


def as_json(plan: Plan, results: Results, missing: Mapping[str, str]) -> dict[str, object]:
    """Return everything as an object for ``json``."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan.name,
        "machine": machine.describe(),
        "ours": {name: _version(name) for name in ("dualclaw", "grpcio", "uvloop", "protobuf")},
        "peers": {peer.name: versions(peer) for peer in PEERS if peer.name not in missing},
        "missing": dict(missing),
        "quiet": verdict_on_machine(results),
        "rows": [_row(row, report) for row, report in results],
    }


def _row(row: Row, report: Report) -> dict[str, object]:
    return {
        "row": row.number,
        "title": row.title,
        "verdict": report.verdict,
        "failure": report.failure,
        "noise": None if report.noise is None else {**asdict(report.noise), "quiet": report.noise.quiet},
        "notes": list(dict.fromkeys(report.notes)),
        "cases": [{**asdict(case), "verdict": case.verdict} for case in report.cases],
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return "unknown"
