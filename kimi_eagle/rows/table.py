"""The rows file: `rows.safetensors`, flat arrays over all rows. Imports numpy and safetensors.

- `token_ids` int32 [tokens]; `loss_mask` uint8 [tokens]; `offsets` int64 [rows + 1]
- `split` uint8 [rows]: 0 trains, 1 validates
- `source`, `file`, `record`, `line` int32 [rows]: which source, file (of all, by number), record
  and line a row came of, for people; the line is 0 where there is none
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "rows.safetensors"
TRAIN, VALIDATE = 0, 1
ORIGIN = ("file", "line", "record", "source")
"""The columns that say where a row came of, as `RowsWriter.add` takes them."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Rows:
    """Rows in order, as arrays."""

    token_ids: Any
    loss_mask: Any
    offsets: Any
    split: Any
    source: Any
    record: Any
    file: Any = None
    line: Any = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def ids(self, row: int) -> Any:
        """int32 [tokens] of one row."""
        return self.token_ids[self.offsets[row] : self.offsets[row + 1]]

    def mask(self, row: int) -> Any:
        """uint8 [tokens] of one row."""
        return self.loss_mask[self.offsets[row] : self.offsets[row + 1]]

    def indices(self, split: int) -> list[int]:
        return [int(row) for row in np.nonzero(self.split == split)[0]]

    def id_bytes(self, row: int) -> bytes:
        """The row's ids as little-endian int32, for its key."""
        return bytes(self.ids(row).astype("<i4").tobytes())


def save_rows(
    folder: Path,
    token_ids: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    split: Sequence[int],
    source: Sequence[int],
    record: Sequence[int],
    file: Sequence[int] | None = None,
    line: Sequence[int] | None = None,
) -> None:
    """Write rows that are in memory; without a file or a line these are 0."""
    lengths = [len(ids) for ids in token_ids]
    save_file(
        {
            "token_ids": np.fromiter((t for ids in token_ids for t in ids), np.int32, sum(lengths)),
            "loss_mask": np.fromiter(
                (m for mask in loss_masks for m in mask), np.uint8, sum(lengths)
            ),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "split": np.asarray(split, np.uint8),
            "source": np.asarray(source, np.int32),
            "record": np.asarray(record, np.int32),
            **({} if file is None else {"file": np.asarray(file, np.int32)}),
            **({} if line is None else {"line": np.asarray(line, np.int32)}),
        },
        folder / FILE,
    )


class RowsWriter:
    """Writes rows as they come, so that memory does not grow with them: an open file for every
    array, put together at the end. The file is byte for byte what `save_rows` would write.

    Raises: OSError, of the disk.
    """

    def __init__(self, scratch: Path, columns: Sequence[str] = ORIGIN):
        """
        Args:
            scratch: a folder for the arrays until they are whole.
            columns: the int32 [rows] that say where a row came from.
        """
        self._columns = tuple(columns)
        # In the order of the safetensors library: by type, the widest first, then by name.
        self._types = {
            "offsets": ("I64", "<i8"),
            **dict.fromkeys(sorted([*columns, "token_ids"]), ("I32", "<i4")),
            "loss_mask": ("U8", "u1"),
            "split": ("U8", "u1"),
        }
        self._files = {name: (scratch / name).open("w+b") for name in self._types}
        self._sizes = dict.fromkeys(self._types, 0)
        self._put("offsets", [0])

    def __enter__(self) -> RowsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def __len__(self) -> int:
        return self._sizes["offsets"] - 1

    @property
    def tokens(self) -> int:
        return self._sizes["token_ids"]

    def add(self, token_ids: Any, loss_mask: Any, *columns: int) -> None:
        """A row: its ids and mask, of equal length, and what each column says of it."""
        assert len(token_ids) == len(loss_mask)
        self._put("token_ids", token_ids)
        self._put("loss_mask", loss_mask)
        self._put("offsets", [self.tokens])
        for name, value in zip(self._columns, columns, strict=True):
            self._put(name, [value])

    def finish(self, folder: Path, split: Sequence[int]) -> None:
        """Write `rows.safetensors`; no row can be added after.

        Args:
            split: for each row, `TRAIN` or `VALIDATE`.
        """
        assert len(split) == len(self)
        self._put("split", split)
        header, end = {}, 0
        for name, (kind, dtype) in self._types.items():
            size = self._sizes[name] * np.dtype(dtype).itemsize
            header[name] = {
                "dtype": kind,
                "shape": [self._sizes[name]],
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        with (folder / FILE).open("wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            for file in self._files.values():
                file.seek(0)
                shutil.copyfileobj(file, target, _BLOCK)

    def _put(self, name: str, values: Any) -> None:
        array = np.asarray(values, self._types[name][1])
        self._files[name].write(array.tobytes())
        self._sizes[name] += len(array)


def load_rows(folder: Path) -> Rows:
    """Raises: OSError, or safetensors' error for a damaged file."""
    return Rows(**load_file(folder / FILE))
