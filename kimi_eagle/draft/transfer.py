"""The state store as speculators sees hidden states. Imports hs_connectors.

speculators' data sets take a `HiddenStatesTransfer`, by default one of files `hs_N.safetensors`.
This one gives them the rows of a states artifact, straight out of the shards:

    transfer = StoreTransfer.open(root / "objects" / digest[:2] / digest, root)
    ArrowDataset(max_len, datapath, transfer=transfer, on_missing="raise")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hs_connectors import HiddenStatesTransfer

from kimi_eagle.states.index import Place, StateIndex, placed
from kimi_eagle.states.layout import ROWS, read_rows
from kimi_eagle.states.reader import ShardReader

# What the coordinator names the registry; the worker's side must not import it from there.
_REGISTRY = "registry.sqlite"


class StoreTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Rows of one states artifact, by their number in it."""

    def __init__(self, places: Sequence[Place | None], reader: ShardReader):
        """Args: `places`: where each row lies; None for one whose states were refused."""
        self._places = places
        self._reader = reader

    @classmethod
    def open(cls, artifact: Path, root: Path) -> StoreTransfer:
        """The rows of the states artifact in a folder, of the store under `root`.

        Raises:
            StageFailed: the store does not hold a row as it was made.
        """
        listed = read_rows((artifact / ROWS).read_text("utf-8"))
        index = StateIndex(root / _REGISTRY)
        try:
            places = [place for _, place in placed(listed, index)]
        finally:
            index.close()
        return cls(places, ShardReader(root))

    def get_cached(self, file_idx: int) -> dict[str, Any] | None:
        """`hidden_states` bfloat16 [tokens, aux layers + 1, hidden], mapped rather than copied, and
        `token_ids` int64 [tokens]; None where there is no such row, or it has no states."""
        place = self._places[file_idx] if 0 <= file_idx < len(self._places) else None
        if place is None:
            return None
        states, ids = self._reader.read(place)
        return {"hidden_states": states, "token_ids": ids.to(torch.int64)}

    def get_generated(self, hs_transfer_params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Raises: RuntimeError, always."""
        raise RuntimeError(
            "the state store generates nothing while a training runs: extract the rows first, and "
            "pass on_missing='raise' or 'skip'"
        )
