"""The picture for the docs: every case a line, its ratio with its interval and its goal on one logarithmic axis."""

import math
from html import escape

from tests.bench.plan import Case
from tests.bench.report import Results, interval, verdict_on_machine

LEFT, WIDTH, RIGHT, LINE = 470, 480, 190, 22
_FILL = {"met": "#1a7f37", "not met": "#cf222e", "too noisy": "#9a6700"}
_TITLE = "Ratio of ours to theirs, with its 95 % interval; the bar across is the goal, a thin line the floor"
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'


class _Axis:
    """Where a ratio is, between the powers of ten that hold them all."""

    def __init__(self, values: list[float]) -> None:
        seen = [value for value in values if value > 0] or [1.0]
        self.low = math.floor(math.log10(min(*seen, 0.9)))
        self.high = math.ceil(math.log10(max(*seen, 1.1)))

    def at(self, value: float) -> float:
        """Return the place of a ratio; one that is not above 0 is at the left end."""
        power = max(math.log10(value), self.low) if value > 0 else self.low
        return LEFT + WIDTH * (power - self.low) / (self.high - self.low)


def draw(results: Results) -> str:
    """Return the picture as SVG; a row that was not measured is there and says so."""
    cases = [case for _, report in results for case in report.cases]
    floors = [case.floor.to_theirs.value for case in cases if case.floor is not None]
    axis = _Axis(floors + [value for case in cases for value in (case.ratio.low, case.ratio.high, case.goal.bound)])
    parts: list[str] = []
    top = 50
    for row, report in sorted(results, key=lambda result: result[0].number):
        parts.append(_text(10, top, f"{row.number}. {row.title}", weight="600"))
        top += LINE
        for case in report.cases:
            parts.append(_case(axis, case, top))
            top += LINE
        if report.failure:
            parts.append(_text(24, top, f"{report.verdict}: {report.failure[:120]}", fill=_FILL["not met"]))
            top += LINE
        top += 6
    parts = [
        *_scale(axis, top),
        *parts,
        _text(10, top + 34, verdict_on_machine(results).partition(" (")[0], fill="#57606a"),
    ]
    width, height = LEFT + WIDTH + RIGHT, top + 50
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join(
        [head, "<title>Ours to theirs, by row</title>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
         _text(10, 20, _TITLE, weight="600"),
         *parts, "</svg>", ""]
    )  # fmt: skip


def _scale(axis: _Axis, bottom: int) -> list[str]:
    lines = []
    for power in range(axis.low, axis.high + 1):
        place, strong = axis.at(10.0**power), power == 0
        colour = "#57606a" if strong else "#d0d7de"
        lines.append(_line(place, 32, place, bottom, colour))
        lines.append(_text(place, bottom + 14, f"{10.0**power:g}x", anchor="middle", fill="#57606a"))
    return lines


def _case(axis: _Axis, case: Case, top: int) -> str:
    ratio, colour, middle = case.ratio, _FILL[case.verdict], top - 4
    goal = axis.at(case.goal.bound)
    floor = None if case.floor is None else axis.at(case.floor.to_theirs.value)
    return "".join(
        [
            _text(24, top, f"{case.label}, vs {case.against}"),
            _line(axis.at(ratio.low), middle, axis.at(ratio.high), middle, colour, width=3),
            f'<circle cx="{axis.at(ratio.value):.1f}" cy="{middle}" r="4" fill="{colour}"/>',
            _line(goal, middle - 8, goal, middle + 8, "#0969da", width=3),
            "" if floor is None else _line(floor, middle - 8, floor, middle + 8, "#1f2328"),
            _text(LEFT + WIDTH + 10, top, f"{interval(case.ratio)} {case.verdict}", fill=colour),
        ]
    )


def _line(left: float, top: float, right: float, bottom: float, colour: str, *, width: int = 1) -> str:
    ends = f'x1="{left:.1f}" y1="{top}" x2="{right:.1f}" y2="{bottom}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(
    left: float, top: float, text: str, *, weight: str = "400", fill: str = "#1f2328", anchor: str = "start"
) -> str:
    place = f'x="{left:.1f}" y="{top}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f"<text {place} {_FONT}>{escape(text)}</text>"
