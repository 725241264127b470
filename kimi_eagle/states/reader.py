"""Read rows of hidden states out of shards. Imports torch and safetensors."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kimi_eagle.states.index import Place
from kimi_eagle.states.layout import shard_path


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
