"""The benchmark, ``python -m tests.bench [--quick] [--rows 1,3] [--json FILE] [--svg FILE]``, from the root.

Prints what is going on, then goal, value and verdict of every row. ``docs/performance.md`` tells how to read it.

Exit codes: 0 when every row was measured, whatever its verdict; 1 when one was not; 2 for wrong options, or on a system
that is not Linux.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import picture, report
from tests.bench.children import BenchError, Disturbed
from tests.bench.machine import Watch
from tests.bench.plan import FULL, QUICK, SMOKE, Plan, Report, Row
from tests.bench.rows import ROWS
from tests.bench.stage import Stage

LONGEST_ROW = 900.0
"""Seconds a row may take; one that takes longer is stopped and says so."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    if sys.platform != "linux":
        console.print("The benchmark reads CPU and memory from Linux; it does not run elsewhere.")
        return 2
    plan: Plan = options.plan
    results: list[tuple[Row, Report]] = []
    missing: dict[str, str] = {}
    # Whoever interrupts it is shown what was measured until then.
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="dualclaw-bench-") as folder:
        asyncio.run(_measure(Path(folder), plan, options.rows, console, results, missing))
    results.sort(key=lambda result: result[0].number)
    report.show(console, results, missing)
    if options.json:
        found = report.as_json(plan, results, missing)
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if options.svg:
        options.svg.write_text(picture.draw(results), "utf-8")
    return int(any(row_report.verdict == "not measured" for _, row_report in results))


async def _measure(
    folder: Path,
    plan: Plan,
    rows: Sequence[Row],
    console: Console,
    results: list[tuple[Row, Report]],
    missing: dict[str, str],
) -> None:
    """Measure the rows; ``results`` and ``missing`` are filled on the way."""
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {text}", style="dim", markup=False)

    async with Stage(folder, say, missing) as stage:
        for row in rows:
            found = Report(failure="interrupted")
            results.append((row, found))
            say(f"row {row.number}: {row.title}")
            try:
                async with asyncio.timeout(LONGEST_ROW):
                    await _row(stage, plan, row, found)
                found.failure = ""
            except TimeoutError:
                found.failure = f"not done after {LONGEST_ROW:g} s"
            except BenchError as error:
                found.failure, found.disturbed = str(error), isinstance(error, Disturbed)
            say(f"row {row.number}: {found.failure or found.verdict}")


async def _row(stage: Stage, plan: Plan, row: Row, found: Report) -> None:
    before = Watch.now(stage.pids)
    try:
        await row.measure(stage, plan, found)
    finally:
        found.noise = before.until(Watch.now(stage.pids))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Measures every row of docs/performance.md."
    )
    parser.set_defaults(plan=FULL)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", dest="plan", action="store_const", const=QUICK, help="fewer repetitions, five minutes"
    )
    sizes.add_argument("--smoke", dest="plan", action="store_const", const=SMOKE, help="shows that the harness works")
    parser.add_argument("--rows", type=_rows, default=ROWS, metavar="N,...", help="only these rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture")
    return parser


def _rows(text: str) -> tuple[Row, ...]:
    known = {str(row.number) for row in ROWS}
    wanted = {part.strip() for part in text.split(",")}
    if not wanted <= known:
        raise argparse.ArgumentTypeError(
            f"no such row: {', '.join(sorted(wanted - known))}; there are 1 to {len(ROWS)}"
        )
    return tuple(row for row in ROWS if str(row.number) in wanted)


if __name__ == "__main__":
    sys.exit(main())
