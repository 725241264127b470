"""Where output goes: whether it may have colour, how wide it is, and tables that fit."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from kimi_eagle.identity import SHOWN

AUTO, ALWAYS, NEVER = "auto", "always", "never"

# The sixteen colours that every terminal has, by what they say; never the only sign of it.
_STYLES = {"good": "32", "bad": "31", "warn": "33", "busy": "36", "dim": "2"}
_WORDS = {
    "done": "good",
    "executed": "good",
    "identical": "good",
    "reused": "dim",
    "reuse": "dim",
    "running": "busy",
    "run": "busy",
    "failed": "bad",
    "differs": "bad",
    "missing": "bad",
    "lost": "bad",
    "interrupted": "warn",
    "evicted": "warn",
    "ok": "good",
    "warn": "warn",
    "broken": "bad",
    "absent": "dim",
}
_WORD_COLUMNS = frozenset({"STATUS", "RESULT", "ACTION", "STATE"})

_GAP = 2
# What hashes and texts give way to before a column goes, in characters.
_HASH_FLOOR = 8
_TEXT_FLOOR = 20
# The least that is left to the last column of a table when its text is wrapped.
_WRAP_FLOOR = 24

Needed = Callable[[set[str]], Mapping[str, int]]
"""Hashes → of each, as many characters as tell it from every other hash there is."""

_mode = AUTO
_needed: Needed | None = None


class Hash(str):
    """A whole hash in a table; on a terminal its start stands for it."""

    needed: int

    def __new__(cls, value: str, needed: int = 0) -> Hash:
        """`needed`: as many characters as tell it from every other hash in the registry."""
        made = super().__new__(cls, value)
        made.needed = needed
        return made

    def start(self, length: int = SHOWN) -> str:
        return self[: max(length, self.needed)]


@contextmanager
def while_read(stream: TextIO) -> Iterator[None]:
    """Go on in silence when the reader of a stream goes away (`| head`)."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def configure(mode: str, needed: Needed | None = None) -> None:
    """Take `--color` (`auto`, `always` or `never`), and who knows how short hashes may be."""
    global _mode, _needed
    _mode, _needed = mode, needed


def wants_colour(mode: str, environment: Mapping[str, str], *, is_terminal: bool) -> bool:
    """--color, then NO_COLOR, then FORCE_COLOR, then whether it is a terminal."""
    if mode != AUTO:
        return mode == ALWAYS
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def coloured(stream: TextIO) -> bool:
    return wants_colour(_mode, os.environ, is_terminal=stream.isatty())


def paint(text: str, style: str | None, stream: TextIO) -> str:
    """The text in a style (`good`, `bad`, `warn`, `busy`, `dim`), where `stream` has colour."""
    if style is None or not text or not coloured(stream):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def word(text: str, stream: TextIO) -> str:
    """A word for a state, in its colour; a sign before it has the same."""
    return paint(text, _WORDS.get(text.rpartition(" ")[2]), stream)


def shows(stream: TextIO, text: str) -> bool:
    """Whether a stream is a terminal whose encoding has every character of a text."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return stream.isatty()


def columns() -> int:
    """The width of the terminal, in characters."""
    return shutil.get_terminal_size().columns


def human_size(count: float) -> str:
    """Bytes for people: 4.7 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """A time for people: 0:42, 12:05, 3:20:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def plain(text: str) -> str:
    """The text on one line, with nothing in it that a terminal would act upon."""
    return "".join(c if c.isprintable() else " " if c in "\t\n" else "\ufffd" for c in text)


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns; where some is missing it ends in `…`."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept = ""
    for character in text:
        if cells(kept + character) > width - 1:
            break
        kept += character
    return kept + "…"


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` columns, parted at blanks where there are any."""
    lines, line = [], ""
    for piece in text.split(" "):
        joined = f"{line} {piece}" if line else piece
        if cells(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        while cells(piece) > width:
            head = cut(piece, width + 1)[:-1] or piece[0]
            lines.append(head)
            piece = piece[len(head) :]
        line = piece
    return [*lines, line] if line or not lines else lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, tab-separated values in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(_coloured(header, row, [cell.translate(_BLANKS) for cell in row])))
        return
    lines, dropped = fit(header, _told_apart(rows), columns())
    for line in lines:
        print(line)
    if dropped:
        print(
            f"({', '.join(dropped)} not shown: the terminal is {columns()} columns wide; "
            "a pipe or --json has all)",
            file=sys.stderr,
        )


def _told_apart(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Rows whose hashes know how short they may become."""
    unknown = {cell for row in rows for cell in row if isinstance(cell, Hash) and not cell.needed}
    if not unknown or _needed is None:
        return rows
    known = _needed({str(item) for item in unknown})
    return [
        [Hash(cell, known.get(cell, 0)) if cell in unknown else cell for cell in row]
        for row in rows
    ]


_BLANKS = {ord("\t"): " ", ord("\n"): " ", ord("\r"): " "}


def _coloured(
    header: Sequence[str], row: Sequence[str], shown: Sequence[str], width: Sequence[int] = ()
) -> list[str]:
    """Cells as shown, words for states in colour, and filled up to `width`."""
    found = []
    for index, text in enumerate(shown):
        filled = " " * (width[index] - cells(text)) if index < len(width) else ""
        is_word = index < len(header) and header[index] in _WORD_COLUMNS
        found.append((word(text, sys.stdout) if is_word else text) + filled)
    return found


def fit(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[str]]:
    """The lines of a table no wider than `width`, and the names of the columns left out.

    The last column is wrapped as long as that leaves it some room; then hashes and long texts
    become shorter, a hash never shorter than what it is known by; then columns go, from the right.
    """
    count = len(header)
    names = list(header)
    while True:
        for floor_hash, floor_text in ((SHOWN, None), (_HASH_FLOOR, _TEXT_FLOOR)):
            shown = [
                [
                    _cell(cell, floor_hash, floor_text if index else None)
                    for index, cell in enumerate(row[:count])
                ]
                for row in rows
            ]
            widths = [
                max([cells(names[index]), *(cells(row[index]) for row in shown)])
                for index in range(count)
            ]
            rest = width - sum(widths[:-1]) - _GAP * (count - 1)
            is_text = not any(isinstance(row[count - 1], Hash) for row in rows)
            if widths[-1] <= rest or (is_text and count > 1 and rest >= _WRAP_FLOOR):
                return _lines(names[:count], rows, shown, widths, rest), names[count:]
        if count == 1:
            return _lines(names[:1], rows, shown, widths, max(widths[0], 1)), names[1:]
        count -= 1


def _cell(cell: str, hash_length: int, text_length: int | None) -> str:
    if isinstance(cell, Hash):
        return cell.start(hash_length)
    text = plain(cell)
    return text if text_length is None else cut(text, text_length)


def _lines(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    shown: Sequence[Sequence[str]],
    widths: Sequence[int],
    rest: int,
) -> list[str]:
    last = len(names) - 1
    title = _join([name + " " * (widths[i] - cells(name)) for i, name in enumerate(names)])
    lines = [paint(title, "dim", sys.stdout)]
    for row, texts in zip(rows, shown, strict=True):
        cell = row[last]
        parts = [texts[last]] if isinstance(cell, Hash) else wrap(plain(cell), max(rest, 1))
        first = [*texts[:last], parts[0]]
        lines.append(_join(_coloured(names, row, first, widths[:last])))
        indent = sum(widths[:last]) + _GAP * last
        lines += [" " * indent + part for part in parts[1:]]
    return lines


def _join(parts: Sequence[str]) -> str:
    return (" " * _GAP).join(parts).rstrip()
