"""Curves as lines of text, for a terminal of any width or a pipe. Pure.

loss        train 2.311   val 2.289 ●
8.03 ┤⡇
     │⢣
     │ ⠑⢄   ●
2.29 ┤   ⠉⠒⠒⠤⠤⠤⣀⣀●
     └──────────────
      1          264
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_eagle.terminal import cells, cut

Curve = Sequence[tuple[float, float]]
"""Points (x, y), by rising x; finite numbers."""

# The least and the most columns that curves are drawn in.
_NARROWEST, _WIDEST = 8, 100
# Dots of a braille character, by row and column: bits of its code point from U+2800 on.
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class Style:
    """The characters that a plot is made of."""

    across: int
    """Dots in a character, side by side."""
    down: int
    """Dots in a character, one below the other."""
    mark: str
    tick: str
    side: str
    corner: str
    floor: str
    cut: str

    def character(self, dots: int) -> str:
        """The character with these dots; bit `row * across + column` is set for each."""
        if self.across == 2:
            bits = [_BRAILLE[bit // 2][bit % 2] for bit in range(8) if dots >> bit & 1]
            return chr(0x2800 + sum(bits))
        return {1: "'", 2: "-", 4: "."}.get(dots, "|")


BRAILLE = Style(2, 4, "●", "┤", "│", "└", "─", "…")
ASCII = Style(1, 3, "o", "+", "|", "+", "-", "~")


def style_for(encoding: str | None) -> Style:
    """What a stream with this encoding can show."""
    try:
        (chr(0x28FF) + BRAILLE.mark + BRAILLE.tick + BRAILLE.corner).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BRAILLE


def plot(
    title: str,
    line: Curve,
    marks: Curve = (),
    *,
    width: int,
    height: int = 6,
    style: Style = BRAILLE,
    low: float | None = None,
    high: float | None = None,
    names: tuple[str, str] = ("train", "val"),
) -> list[str]:
    """A plot of one curve as a line, and of another as marks on it.

    Args:
        width, height: in characters; what is narrower than can be drawn in is drawn in what can.
        low, high: the range of y; None: that of the curves.
        names: of the line and of the marks.

    Returns: lines without colour, none of them wider than `width` unless that is below 21.
    """
    both = [*line, *marks]
    if not both:
        return [cut(f"{title}: nothing", width).replace("…", style.cut)]
    bottom = min(y for _, y in both) if low is None else low
    top = max(y for _, y in both) if high is None else high
    labels = _figure(top), _figure(bottom)
    room = max(map(cells, labels))
    columns = max(min(width - room - 2, _WIDEST), _NARROWEST)
    frame = _Frame(
        (min(x for x, _ in both), max(x for x, _ in both)), (bottom, top), columns, height, style
    )
    frame.draw(line)
    frame.mark(marks)
    heading = [title.ljust(room + 2)]
    for name, curve, sign in ((names[0], line, ""), (names[1], marks, " " + style.mark)):
        if curve:
            heading.append(f"{name} {_figure(curve[-1][1])}{sign}")
    title = cut("  ".join(heading), max(width, room + 2 + _NARROWEST))
    found = [title.replace("…", style.cut)]
    for number, text in enumerate(frame.rows()):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        edge = style.tick if label else style.side
        found.append(f"{label:>{room}} {edge}{text}".rstrip())
    found.append(" " * (room + 1) + style.corner + style.floor * columns)
    first, last = _figure(frame.across[0]), _figure(frame.across[1])
    gap = columns - cells(first) - cells(last)
    steps = first if gap < 1 else first + " " * gap + last
    return [*found, " " * (room + 2) + steps]


class _Frame:
    """A field of dots that curves are drawn in."""

    def __init__(
        self,
        across: tuple[float, float],
        down: tuple[float, float],
        columns: int,
        height: int,
        style: Style,
    ):
        self.across = across
        self._down = down
        self._style = style
        self._columns, self._height = columns, height
        self._width, self._depth = columns * style.across, height * style.down
        self._dots: dict[tuple[int, int], int] = {}
        self._marks: set[tuple[int, int]] = set()

    def draw(self, curve: Curve) -> None:
        """Draw a line through points."""
        before: tuple[int, int] | None = None
        for x, y in _thinned(curve, self._width):
            here = self._place(x, y)
            for column, row in _between(before or here, here):
                self._set(column, row)
            before = here

    def mark(self, curve: Curve) -> None:
        """Put a mark at each point."""
        for x, y in curve:
            column, row = self._place(x, y)
            self._marks.add((column // self._style.across, row // self._style.down))

    def rows(self) -> list[str]:
        """From the top, without blanks at the end."""
        return [
            "".join(self._character(column, row) for column in range(self._columns)).rstrip()
            for row in range(self._height)
        ]

    def _character(self, column: int, row: int) -> str:
        if (column, row) in self._marks:
            return self._style.mark
        dots = self._dots.get((column, row), 0)
        return self._style.character(dots) if dots else " "

    def _place(self, x: float, y: float) -> tuple[int, int]:
        """The dot of a point: column from the left, row from the top."""
        column = _scaled(x, *self.across, self._width - 1)
        return column, self._depth - 1 - _scaled(y, *self._down, self._depth - 1)

    def _set(self, column: int, row: int) -> None:
        style = self._style
        bit = row % style.down * style.across + column % style.across
        cell = (column // style.across, row // style.down)
        self._dots[cell] = self._dots.get(cell, 0) | 1 << bit


def _scaled(value: float, low: float, high: float, most: int) -> int:
    """Where a value is between 0 and `most`; in the middle where there is no range."""
    if high == low:
        return most // 2
    share = min(max((value - low) / (high - low), 0.0), 1.0)
    return round(share * most)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from one to another, both of them included."""
    (x, y), (u, v) = start, end
    count = max(abs(u - x), abs(v - y), 1)
    return [
        (x + round((u - x) * n / count), y + round((v - y) * n / count)) for n in range(count + 1)
    ]


def _thinned(curve: Curve, columns: int) -> Curve:
    """A curve of many points with those alone that show: of each stretch the first, the lowest,
    the highest and the last."""
    size = len(curve) // (columns * 2)
    if size < 4:
        return curve
    found: list[tuple[float, float]] = []
    for start in range(0, len(curve), size):
        part = curve[start : start + size]
        by_value = sorted(range(len(part)), key=lambda index: part[index][1])
        kept = {0, by_value[0], by_value[-1], len(part) - 1}
        found += [part[index] for index in sorted(kept)]
    return found


def _figure(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"
