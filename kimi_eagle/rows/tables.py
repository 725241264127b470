"""Records of tables, `.parquet` and `.arrow`, and the reader of `.zst`. Needs pyarrow, which comes
with what executes stages."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from kimi_eagle.rows.records import UNREADABLE, Record
from kimi_eagle.rows.strict_json import BadRecord

# Rows that are held as Python values at a time.
_BATCH = 128
# What is read of a column at a time, where the library would read it whole.
_BUFFER = 1 << 20


def read_table(path: Path) -> Iterator[Record]:
    """The rows of a table, in order, as records without a line.

    A table has one type for each column: of a struct whose keys differ between rows the missing
    ones read as null, which `Record.in_table` says.

    Raises:
        BadRecord: the file is no such table, or pyarrow is not installed.
        OSError: it cannot be opened.
    """
    arrow = _pyarrow(path)
    number = 0
    with path.open("rb"):
        pass  # the error of a file that is not there, before the library's own
    try:
        batches = _parquet(path) if path.suffix.lower() == ".parquet" else _arrow(path)
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH):
                for value in batch.slice(start, _BATCH).to_pylist():
                    number += 1
                    yield Record(number, value=value)
    except (arrow.ArrowException, OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        if number == 0:
            raise BadRecord(f"{path.name}: no {path.suffix} file that can be read: {why}") from None
        yield Record(number + 1, error=f"damaged: {why}", reason=UNREADABLE)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise BadRecord(
            f"{path.name}: {path.suffix} is read by pyarrow, which is not installed here; "
            "pip install pyarrow, or give the records as .jsonl"
        ) from None
    return pyarrow


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=_BATCH)


def _arrow(path: Path) -> Iterator[Any]:
    """Record batches of a stream, as `save_to_disk` writes it, or of a file."""
    from pyarrow import ArrowInvalid, OSFile, ipc

    with OSFile(str(path)) as source:
        try:
            reader = ipc.open_stream(source)
        except ArrowInvalid:
            file = ipc.open_file(source)
            yield from (file.get_batch(index) for index in range(file.num_record_batches))
            return
        yield from reader


def open_zstd(path: Path) -> IO[bytes]:
    """A `.zst` file, read as it unpacks; `EOFError` where it is damaged or cut off.

    Raises:
        BadRecord: pyarrow is not installed.
        OSError: it cannot be opened.
    """
    _pyarrow(path)
    return cast(IO[bytes], io.BufferedReader(_Unpacked(path), 1 << 20))


class _Unpacked(io.RawIOBase):
    def __init__(self, path: Path):
        import pyarrow

        self._file = path.open("rb")
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._file, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import pyarrow

        try:
            data = self._stream.read(len(buffer))
        except (OSError, pyarrow.ArrowException) as error:
            raise EOFError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
