"""Read records from chat files, one at a time: memory as for the largest record, not the file.

`.jsonl` and `.json` (an array, or one object a line), plain, `.gz`, `.xz` or `.zst`; `.parquet`;
and `.arrow`, as a Hugging Face dataset is saved. JSON is read strictly (see `strict_json`) with the
standard library alone; tables and `.zst` need pyarrow, which is loaded for them.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from kimi_eagle.rows.json_array import parsed, read_array
from kimi_eagle.rows.records import MAX_BYTES, TOO_LARGE, TRUNCATED, UNREADABLE, Record
from kimi_eagle.rows.source_files import KINDS, TABLES, bare_name, is_readable
from kimi_eagle.rows.strict_json import BadRecord, loads

__all__ = ["BadRecord", "Record", "loads", "read_records"]

_MARK = b"\xef\xbb\xbf"
_DAMAGE = (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order; unreadable ones carry their error. A file that is damaged
    or cut off yields what is whole, and then a record with the error.

    Raises:
        BadRecord: the file as a whole cannot be read (no records at all in it, or of a kind that
            is not known).
        OSError: it cannot be opened.
    """
    name = bare_name(path.name)
    if not is_readable(path):
        raise BadRecord(f"{path.name}: unsupported; known are {KINDS}")
    if name.endswith(TABLES):
        from kimi_eagle.rows.tables import read_table

        yield from read_table(path)
        return
    number, line = 0, 1
    try:
        by_line = name.endswith(".jsonl") or not _begins_array(path)
        with _open(path) as file:
            for record in _lines(file) if by_line else read_array(file):
                number, line = record.number, record.line or line
                yield record
    except _DAMAGE as error:
        if number == 0:
            raise BadRecord(f"{path.name}: damaged compression: {error}") from None
        yield Record(
            number + 1,
            number + 1 if by_line else line,
            error=f"damaged compression: {error}",
            reason=TRUNCATED if isinstance(error, EOFError) else UNREADABLE,
        )


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    if suffix == ".zst":
        from kimi_eagle.rows.tables import open_zstd

        return open_zstd(path)
    return path.open("rb")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    number = 0
    while line := file.readline(MAX_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(_MARK)
        if len(line) > MAX_BYTES:
            while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                pass
            yield Record(number, number, error=f"more than {MAX_BYTES} bytes", reason=TOO_LARGE)
        elif line.strip():
            # Whoever writes a line ends it: one that is no JSON and has no end was cut off.
            reason = UNREADABLE if line.endswith(b"\n") else TRUNCATED
            yield parsed(line, number, number, reason)


def _begins_array(path: Path) -> bool:
    """Whether a `.json` file holds an array; if not, it must hold one object a line, as much that
    is called .json does.

    Raises:
        BadRecord: it holds neither.
    """
    with _open(path) as file:
        start = b""
        while not start and (piece := file.read1(1 << 16)):  # type: ignore[attr-defined]
            start = piece.removeprefix(_MARK).lstrip(b" \t\r\n")
        if start.startswith(b"["):
            return True
    with _open(path) as file:
        first = next(_lines(file), None)
    if first is None or not isinstance(first.value, dict):
        why = "" if first is None or first.error is None else f": {first.error}"
        raise BadRecord(f"{path.name}: must hold an array of records, or one record a line{why}")
    return False
