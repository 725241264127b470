"""A chart as SVG: axes, lines with the range of what they were thinned out from, marks, gaps. Pure.

No style is in it but classes (the page allows no inline style): series are told apart by colour and
by dashes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kimi_eagle.ui.trainings import Chart, Line, Series

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
_INNER = WIDTH - LEFT - RIGHT
_DEEP = HEIGHT - TOP - BOTTOM
# So many columns a curve is thinned out to: each shows the range and the mean of its points.
_COLUMNS = 160
STYLES = 8
"""Looks that series have before they are the same again."""
# Corners of marks around their place; none: a circle.
_SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    (),
    ((-3, -3), (3, -3), (3, 3), (-3, 3)),
    ((0, -5), (5, 0), (0, 5), (-5, 0)),
    ((0, -4), (4, 4), (-4, 4)),
    ((0, 4), (4, -4), (-4, -4)),
)


@dataclass(frozen=True)
class Column:
    """The points of a curve that fall into one column of a drawing."""

    step: float
    low: float
    high: float
    mean: float


@dataclass(frozen=True)
class Thin:
    """A curve as it is drawn: unbroken stretches, and the steps where it was no number."""

    stretches: tuple[tuple[Column, ...], ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Scale:
    """From values to places in the drawing, and the values at its ticks."""

    low: float
    high: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        return self.start + self.length * (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[float]:
        step = _nice((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def thin(series: Series, first: float, last: float, columns: int = _COLUMNS) -> Thin:
    """A curve in at most `columns` columns from step `first` to `last`, and a break wherever a
    value was no number."""
    steps, values = series.steps, series.values
    if len(steps) <= columns:
        ends = list(range(1, len(steps) + 1))
    else:
        width = (last - first) / columns
        edges = [bisect_left(steps, first + width * (n + 1)) for n in range(columns)]
        ends = [*dict.fromkeys(edge for edge in edges if edge), len(steps)]
    stretches: list[list[Column]] = [[]]
    gaps: list[float] = []
    start = 0
    for end in dict.fromkeys(ends):
        lost = series.lost[bisect_left(series.lost, start) : bisect_left(series.lost, end)]
        for place in [*lost, end]:
            if place > start:
                part = values[start:place]
                middle = (steps[start] + steps[place - 1]) / 2
                mean = math.fsum(part) / len(part)
                stretches[-1].append(Column(middle, min(part), max(part), mean))
            if place < end:
                if stretches[-1] or not gaps:
                    gaps.append(steps[place])
                    stretches.append([])
                start = place + 1
        start = end
    return Thin(tuple(tuple(s) for s in stretches if s), tuple(gaps))


def draw(chart: Chart, resumed: Sequence[int], name: str) -> Markup:
    """The chart as an `svg` element; `name` is what its ids begin with."""
    first = min(line.series.steps[0] for line in chart.lines)
    last = max(line.series.steps[-1] for line in chart.lines)
    across = _scale(first, last, LEFT, _INNER)
    low = min(line.summary["lowest"]["value"] for line in chart.lines)
    high = max(line.summary["highest"]["value"] for line in chart.lines)
    up = _scale(low, high, TOP + _DEEP, -_DEEP, room=0.04)
    parts: list[Markup] = []
    parts += _axes(across, up)
    for step in resumed:
        if first <= step <= last:
            x = _number(across(step))
            parts.append(
                Markup('<g class="resume"><line x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(
                    x, TOP, TOP + _DEEP
                )
                + Markup("<title>resumed after step {}</title></g>").format(step)
            )
    for line in chart.lines:
        parts += _line(line, line.look % STYLES, across, up, first, last)
    title = Markup('<title id="{0}-t">{1}</title><desc id="{0}-d">{2}</desc>').format(
        name, chart.title, said(chart)
    )
    cursor = Markup('<line class="cursor" x1="0" x2="0" y1="{}" y2="{}" visibility="hidden"/>')
    return (
        Markup(
            '<svg class="chart" viewBox="0 0 {0} {1}" role="img" aria-labelledby="{2}-t {2}-d" '
            'data-first="{3}" data-last="{4}" data-left="{5}" data-inner="{6}">'
        ).format(WIDTH, HEIGHT, name, across.low, across.high, LEFT, _INNER)
        + title
        + Markup("").join(parts)
        + cursor.format(TOP, TOP + _DEEP)
        + Markup("</svg>")
    )


def said(chart: Chart) -> str:
    """The chart in a sentence a line, of all its points."""
    found = []
    for line in chart.lines:
        figures = line.summary
        last, low, high = figures["last"], figures["lowest"], figures["highest"]
        text = (
            f"{line.label}: {short(last['value'])} at step {last['step']}, from "
            f"{short(low['value'])} to {short(high['value'])}"
        )
        if figures["not_finite"]:
            text += f", {figures['not_finite']} times no number"
        found.append(text)
    return "; ".join(found)


def dot(look: int, x: float, y: float) -> Markup:
    """A mark, of another shape for each look."""
    corners = _SHAPES[look % len(_SHAPES)]
    if not corners:
        return Markup('<circle cx="{}" cy="{}" r="3.5"/>').format(_number(x), _number(y))
    places = " ".join(f"{_number(x + dx)},{_number(y + dy)}" for dx, dy in corners)
    return Markup('<polygon points="{}"/>').format(places)


def key(line: Line) -> Markup:
    """How a line of a chart looks, for its legend."""
    style = line.look % STYLES
    drawn = (
        Markup('<g class="dots s{}">{}</g>').format(style, dot(style, 12, 5))
        if line.marked
        else Markup('<line class="line s{}" x1="0" x2="24" y1="5" y2="5"/>').format(style)
    )
    return Markup(
        '<svg class="key" viewBox="0 0 24 10" width="24" height="10" aria-hidden="true">{}</svg>'
    ).format(drawn)


def sparkline(values: Sequence[float]) -> Markup:
    """A line without axes that shows a shape, for the eye alone."""
    if len(values) < 2:
        return Markup("")
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    places = " ".join(
        f"{_number(1 + 78 * index / (len(values) - 1))},{_number(17 - 16 * (value - low) / span)}"
        for index, value in enumerate(values)
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 80 18" width="80" height="18" aria-hidden="true">'
        '<polyline points="{}"/></svg>'
    ).format(places)


def short(value: float) -> str:
    """A number for people: four figures."""
    return f"{value:.4g}"


def _axes(across: Scale, up: Scale) -> Iterator[Markup]:
    for value in up.ticks(4):
        y = _number(up(value))
        yield Markup(
            '<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>'
            '<text class="tick" x="{3}" y="{2}" dy="4" text-anchor="end">{4}</text>'
        ).format(LEFT, WIDTH - RIGHT, y, LEFT - 6, _label(value))
    for value in across.ticks(6):
        if value != round(value):
            continue
        yield Markup('<text class="tick" x="{0}" y="{1}" text-anchor="middle">{2}</text>').format(
            _number(across(value)), HEIGHT - 8, f"{value:.0f}"
        )
    yield Markup('<line class="axis" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(
        LEFT, WIDTH - RIGHT, TOP + _DEEP
    )


def _line(
    line: Line, style: int, across: Scale, up: Scale, first: float, last: float
) -> Iterator[Markup]:
    if line.marked:
        dots = Markup("").join(
            dot(style, across(step), up(value))
            for step, value in zip(*line.series.numbers(), strict=True)
        )
        yield Markup('<g class="dots s{}">{}</g>').format(style, dots)
    else:
        found = thin(line.series, first, last)
        for stretch in found.stretches:
            if any(column.low != column.high for column in stretch):
                edge = [(c.step, c.high) for c in stretch]
                edge += [(c.step, c.low) for c in reversed(stretch)]
                yield Markup('<polygon class="range s{}" points="{}"/>').format(
                    style, _places(edge, across, up)
                )
            places = [(column.step, column.mean) for column in stretch]
            if len(places) == 1:
                yield Markup('<circle class="lone s{}" cx="{}" cy="{}" r="1.5"/>').format(
                    style, _number(across(places[0][0])), _number(up(places[0][1]))
                )
            else:
                yield Markup('<polyline class="line s{}" points="{}"/>').format(
                    style, _places(places, across, up)
                )
        for step in found.gaps:
            yield Markup(
                '<text class="gap s{}" x="{}" y="{}" text-anchor="middle">×<title>'
                "{} is no finite number from step {} on</title></text>"
            ).format(style, _number(across(step)), TOP + _DEEP - 3, line.label, f"{step:.0f}")


def _places(points: Iterable[tuple[float, float]], across: Scale, up: Scale) -> str:
    return " ".join(f"{across(x):.0f},{_number(up(y))}" for x, y in points)


def _scale(low: float, high: float, start: float, length: float, room: float = 0.0) -> Scale:
    if low == high:
        reach = abs(low) * 0.1 or 1.0
        return Scale(low - reach, high + reach, start, length)
    more = (high - low) * room
    return Scale(low - more, high + more, start, length)


def _nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10, … above a value."""
    power = 10.0 ** math.floor(math.log10(value))
    factors = (1, 2, 2.5, 5, 10)
    return next(power * factor for factor in factors if value <= power * factor * 1.0001)


def _label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.4g}" if abs(value) > 1e-12 else "0"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
