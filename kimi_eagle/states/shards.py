"""Write shards of hidden states. Imports torch and safetensors.

A shard is a safetensors file that anybody can read: `hidden_states` [tokens, layers, hidden],
`token_ids` int32 [tokens], `offsets` int64 [rows + 1]; its metadata holds the layer contract.
The `.json` beside it lists the rows, from which the index can be made again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save_file

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.states.contract import LayerContract


def content_digest(states: Any) -> str:
    """BLAKE3 of a row's states, [tokens, layers, hidden] in memory order."""
    return blake3(states.contiguous().view(torch.uint8).numpy()).hexdigest()


class ShardWriter:
    """Collects rows and writes a shard whenever there are enough of them."""

    def __init__(
        self, folder: Path, contract: LayerContract, limit: int, announce: Callable[[str], None]
    ):
        """Args: `limit` in bytes; `announce` is called with the name of each finished shard."""
        self._folder = folder
        self._contract = contract
        self._limit = limit
        self._announce = announce
        self._rows: list[tuple[str, Any, Any]] = []
        self._bytes = 0
        self.digests: dict[str, str] = {}

    def add(self, key: str, states: Any, token_ids: Any) -> None:
        """Take one row: states [tokens, layers, hidden] bf16, ids int [tokens]."""
        self._rows.append((key, states.contiguous(), token_ids.to(torch.int32)))
        self._bytes += states.numel() * states.element_size()
        if self._bytes >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected as a shard of its own."""
        if not self._rows:
            return
        name = f"{secrets.token_hex(8)}.safetensors"
        offsets = [0]
        listed = []
        for key, states, _ in self._rows:
            digest = content_digest(states)
            self.digests[key] = digest
            listed.append([key, offsets[-1], len(states), digest])
            offsets.append(offsets[-1] + len(states))
        path = self._folder / name
        save_file(
            {
                "hidden_states": torch.cat([states for _, states, _ in self._rows]),
                "token_ids": torch.cat([ids for _, _, ids in self._rows]),
                "offsets": torch.tensor(offsets, dtype=torch.int64),
            },
            path,
            metadata={"contract": json.dumps(self._contract.document(), sort_keys=True)},
        )
        write_json(
            path.with_suffix(".json"), {"contract": self._contract.document(), "rows": listed}
        )
        self._rows, self._bytes = [], 0
        self._announce(name)
