"""Read records from chat files: `.jsonl` and `.json`, plain, `.gz` or `.xz`. Standard library only.

JSON is read strictly and alike everywhere: a repeated key, NaN, Infinity and numbers that overflow
make a record bad.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast


class BadRecord(ValueError):
    """A record that cannot be read as JSON."""


@dataclass(frozen=True)
class Record:
    """One record: its number (from 1: the line of a .jsonl, the item of a .json) and its value, or
    why it has none."""

    number: int
    value: Any = None
    error: str | None = None


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order; unreadable ones carry their error.

    Raises:
        BadRecord: the file as a whole cannot be read (no JSON array, wrong encoding, wrong suffix).
        OSError: it cannot be opened.
    """
    name = path.name.lower()
    with _open(path, name) as file:
        name = name.removesuffix(".gz").removesuffix(".xz")
        try:
            if name.endswith(".jsonl"):
                yield from _lines(file)
            elif name.endswith(".json"):
                yield from _array(file, path)
            else:
                raise BadRecord(
                    f"{path.name}: unsupported; known are .jsonl and .json, also with .gz or .xz"
                )
        except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
            raise BadRecord(f"{path.name}: damaged compression: {error}") from None


def _open(path: Path, name: str) -> IO[bytes]:
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if name.endswith(".xz"):
        return cast(IO[bytes], lzma.open(path, "rb"))
    return path.open("rb")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield Record(number, loads(line))
        except BadRecord as error:
            yield Record(number, error=str(error))


def _array(file: IO[bytes], path: Path) -> Iterator[Record]:
    try:
        value = loads(file.read().removeprefix(b"\xef\xbb\xbf"))
    except BadRecord as error:
        raise BadRecord(f"{path.name}: {error}") from None
    if not isinstance(value, list):
        raise BadRecord(f"{path.name}: must hold an array of records")
    for number, item in enumerate(value, 1):
        yield Record(number, item)


def loads(data: bytes) -> Any:
    """Strict JSON.

    Raises:
        BadRecord: not UTF-8, not JSON, a repeated key, a constant that is no JSON, or a number
            that overflows.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_constant=_constant,
            parse_float=_float,
        )
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise BadRecord("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg} at character {error.pos}") from None
    except BadRecord:
        raise
    except ValueError as error:  # a whole number of more digits than Python reads
        raise BadRecord(f"not JSON that is read here: {error}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRecord(f"key {key!r} is repeated")
            seen.add(key)
    return value


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadRecord(f"{text} is too large a number")
    return number


def _constant(name: str) -> Any:
    raise BadRecord(f"{name} is not JSON")
