"""The rows that an extraction has to do, as the stage hands them to an engine's program.

Imports numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3


class Todo:
    """Rows by number: key and token ids."""

    def __init__(self, path: str):
        with np.load(path) as file:
            self.keys = [bytes(key).decode("ascii") for key in file["keys"]]
            self.offsets, self._ids = file["offsets"], file["token_ids"]
        self.number = {key: row for row, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.keys)

    def ids(self, row: int) -> Any:
        """int32 [tokens]."""
        return self._ids[self.offsets[row] : self.offsets[row + 1]]

    def tokens(self, row: int) -> int:
        return int(self.offsets[row + 1] - self.offsets[row])

    @property
    def all_tokens(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    def ids_digest(self, row: int) -> str:
        return blake3(np.ascontiguousarray(self.ids(row), dtype=np.int32).tobytes()).hexdigest()

    @staticmethod
    def write(path: Path, rows: Mapping[str, Any]) -> None:
        """Args: `rows`: token ids, int [tokens], by key, in order."""
        lengths = [len(ids) for ids in rows.values()]
        np.savez(
            path,
            keys=np.array([key.encode("ascii") for key in rows]),
            token_ids=np.concatenate(list(rows.values())).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )
