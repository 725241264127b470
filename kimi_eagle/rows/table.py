"""The rows file: `rows.safetensors`, flat arrays over all rows. Imports numpy and safetensors.

- `token_ids` int32 [tokens]; `loss_mask` uint8 [tokens]; `offsets` int64 [rows + 1]
- `split` uint8 [rows]: 0 trains, 1 validates
- `source`, `file`, `record`, `line` int32 [rows]: which source, file (of all, by number), record
  and line a row came of, for people; the line is 0 where there is none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "rows.safetensors"
TRAIN, VALIDATE = 0, 1


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


def load_rows(folder: Path) -> Rows:
    """Raises: OSError, or safetensors' error for a damaged file."""
    return Rows(**load_file(folder / FILE))
