"""Write shards of hidden states, row after row (`states.shard_file`). Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.shard_file import OpenShard
from kimi_eagle.states.spool import Journal
from kimi_eagle.states.stored_row import Lost, store


class ShardWriter:
    """Writes rows into shards, one after another."""

    def __init__(
        self, folder: Path, contract: LayerContract, limit: int, announce: Callable[[str], None]
    ):
        """Args: `limit` in bytes; `announce` is called with the name of each finished shard."""
        self._folder = folder
        self._contract = contract
        self._limit = limit
        self._announce = announce
        self._open: OpenShard | None = None
        # What lies in a shard that is not closed yet can be kept after a kill.
        self._journal = Journal(folder, contract)
        self.digests: dict[str, str] = {}
        self.lost = Lost()

    def add(self, key: str, states: Any, token_ids: Any) -> None:
        """Take one row: states [tokens, layers, hidden] bf16, ids int [tokens]."""
        if self._open is None:
            self._open = OpenShard(self._folder, self._contract)
        row = store(states, self._contract)
        self.digests[key] = row.digest
        self.lost.add(row.lost)
        ids = token_ids.to(torch.int32).numpy().tobytes()
        start = self._open.place(key, len(states), self.digests[key], ids, row.scales)
        try:
            self._open.fill(start, row.states)
        except OSError:
            self._open.give_room()
            raise
        self._open.filled = self._open.tokens
        self._journal.row(key, self.digests[key], self._open.name, start, len(states))
        if self._open.size >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Close what is open as a shard of its own."""
        if self._open is not None:
            self._announce(self._open.close())
            self._open = None
