"""The records of a JSON array, one at a time: memory as for the largest record, not the file.

The array is cut at the commas between its items before anything is parsed, so that an item that is
no JSON spoils itself alone, as long as its quotes and brackets pair up; where they do not, what
follows cannot be told from it, and all of that is one bad record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, Any

from kimi_eagle.rows.records import MAX_BYTES, TOO_LARGE, TRUNCATED, UNREADABLE, Record
from kimi_eagle.rows.strict_json import BadRecord, loads

_CHUNK = 1 << 20
_MARK = re.compile(rb'["\[\]{},]')
# The inside of a text, as far as a chunk has it: up to its closing quote, or to a backslash whose
# other half is in the next chunk.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OPENER = {0x5D: 0x5B, 0x7D: 0x7B}  # ] → [ and } → {
_QUOTE, _COMMA, _ARRAY_END, _BACKSLASH = 0x22, 0x2C, 0x5D, 0x5C
_BLANK = b" \t\r\n"


def read_array(file: IO[bytes]) -> Iterator[Record]:
    """The items of the array that `file`, read from its start, holds.

    Raises:
        BadRecord: it begins with something else, or with nothing.
    """
    cutter = _Cutter()
    chunk = next(_chunks(file), b"").removeprefix(b"\xef\xbb\xbf")
    while chunk and not (bare := chunk.lstrip(_BLANK)):
        cutter.line += chunk.count(b"\n")
        chunk = next(_chunks(file), b"")
    if not chunk.lstrip(_BLANK).startswith(b"["):
        raise BadRecord("must hold an array of records")
    cutter.line += chunk.count(b"\n", 0, len(chunk) - len(bare))
    yield from cutter.feed(bare[1:])
    for chunk in _chunks(file):
        yield from cutter.feed(chunk)
    yield from cutter.end()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    # read1: what was unpacked before damage is not lost with it.
    while chunk := file.read1(_CHUNK):  # type: ignore[attr-defined]
        yield chunk


class _Cutter:
    def __init__(self) -> None:
        self._item = bytearray()
        self._size = 0
        self._open: list[int] = []
        self._in_text = self._half_escape = self._closed = False
        self._number = 0
        self.line = 1
        self._starts_at: int | None = None
        self._comma_before = False

    def feed(self, chunk: bytes) -> Iterator[Record]:
        at = taken = 0
        while at < len(chunk):
            if self._closed:
                self._keep(chunk[taken:])
                return
            if self._in_text:
                at = self._through_text(chunk, at)
                continue
            mark = _MARK.search(chunk, at)
            if mark is None:
                break
            at, byte = mark.end(), chunk[mark.start()]
            if byte == _QUOTE:
                self._in_text = True
            elif byte in b"[{":
                self._open.append(byte)
            elif byte in b"]}" and self._open:
                self._shut(byte)
            elif byte in (_COMMA, _ARRAY_END) and not self._open:
                self._keep(chunk[taken : at - 1])
                taken = at
                if byte == _ARRAY_END:
                    self._closed = True
                    if self._starts_at is None and not self._comma_before:
                        continue  # an empty array
                yield self._cut()
                self._comma_before = byte == _COMMA
        self._keep(chunk[taken:])

    def end(self) -> Iterator[Record]:
        """What the end of the file leaves."""
        rest = bytes(self._item).strip(_BLANK)
        if self._closed:
            if rest:
                yield self._bad(UNREADABLE, f"after the end of the array: {rest[:40]!r}")
            return
        if rest and not self._in_text and not self._open and self._size <= MAX_BYTES:
            record = self._cut()
            # A number or a word may go on behind the cut.
            if record.error is None and isinstance(record.value, dict):
                yield record
                rest = b""
            else:
                self._number -= 1
                self._starts_at = record.line
        inside = "inside this record" if rest else "before the array's end"
        yield self._bad(TRUNCATED, f"the file ends {inside}: it was cut off, or brackets are amiss")

    def _through_text(self, chunk: bytes, at: int) -> int:
        if self._half_escape:
            self._half_escape = False
            return at + 1
        found = _INSIDE.match(chunk, at)
        assert found is not None, "it matches nothing as well"
        at = found.end()
        if at < len(chunk):
            self._half_escape = chunk[at] == _BACKSLASH
            self._in_text = self._half_escape
            at += 1
        return at

    def _shut(self, closer: int) -> None:
        """Close what a closing bracket closes. One that fits nothing is left to the parser."""
        opener = _OPENER[closer]
        if opener in self._open:
            while self._open.pop() != opener:
                pass

    def _keep(self, piece: bytes) -> None:
        if self._starts_at is None:
            bare = piece.lstrip(_BLANK)
            self.line += piece.count(b"\n", 0, len(piece) - len(bare))
            piece = bare
            if not piece:
                return
            self._starts_at = self.line
        self._size += len(piece)
        self.line += piece.count(b"\n")
        if self._size > MAX_BYTES:
            self._item.clear()  # read past, not kept
        else:
            self._item += piece

    def _cut(self) -> Record:
        data, size = bytes(self._item).strip(_BLANK), self._size
        self._number += 1
        line = self.line if self._starts_at is None else self._starts_at
        self._item.clear()
        self._size, self._starts_at = 0, None
        if size > MAX_BYTES:
            return Record(
                self._number, line, error=f"more than {MAX_BYTES} bytes", reason=TOO_LARGE
            )
        if not data:
            return Record(self._number, line, error="nothing between two commas", reason=UNREADABLE)
        return parsed(data, self._number, line)

    def _bad(self, reason: str, error: str) -> Record:
        line = self.line if self._starts_at is None else self._starts_at
        return Record(self._number + 1, line, error=error, reason=reason)


def parsed(data: bytes, number: int, line: int, reason: str = UNREADABLE) -> Record:
    """A record from its text; `reason` is why it is left out when it is no JSON."""
    try:
        value: Any = loads(data)
    except BadRecord as error:
        return Record(number, line, error=str(error), reason=reason)
    return Record(number, line, value)
