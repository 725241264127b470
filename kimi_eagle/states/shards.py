"""Write and read shards of hidden states (`states.shard_file`). Imports torch and safetensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open

from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.index import Place
from kimi_eagle.states.layout import shard_path
from kimi_eagle.states.shard_file import OpenShard


def content_digest(states: Any) -> str:
    """BLAKE3 of a row's states, [tokens, layers, hidden] in memory order."""
    return blake3(states.contiguous().view(torch.uint8).numpy()).hexdigest()


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
        self.digests: dict[str, str] = {}

    def add(self, key: str, states: Any, token_ids: Any) -> None:
        """Take one row: states [tokens, layers, hidden] bf16, ids int [tokens]."""
        if self._open is None:
            self._open = OpenShard(self._folder, self._contract)
        data = states.contiguous().view(torch.uint8).numpy().data
        self.digests[key] = blake3(data).hexdigest()
        ids = token_ids.to(torch.int32).numpy().tobytes()
        start = self._open.place(key, len(states), self.digests[key], ids)
        self._open.fill(start, data.cast("B"))
        if self._open.size >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Close what is open as a shard of its own."""
        if self._open is not None:
            self._announce(self._open.close())
            self._open = None


class ShardReader:
    """Reads single rows out of shards, mapped rather than loaded."""

    def __init__(self, root: Path):
        self._root = root
        self._open = lru_cache(maxsize=32)(self._open_shard)

    def __getstate__(self) -> dict[str, Any]:
        return {"_root": self._root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_root"])  # type: ignore[misc]

    def _open_shard(self, digest: str) -> Any:
        return safe_open(shard_path(self._root, digest), framework="pt")

    def read(self, place: Place) -> tuple[Any, Any]:
        """(states [tokens, layers, hidden], token ids int32 [tokens]) of one row."""
        shard = self._open(place.shard)
        window = slice(place.start, place.start + place.tokens)
        return shard.get_slice("hidden_states")[window], shard.get_slice("token_ids")[window]
