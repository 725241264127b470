"""How near two hidden states of the same tokens are."""

from __future__ import annotations

from pathlib import Path

import torch

from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import ROWS, read_rows
from kimi_eagle.states.reader import ShardReader

Row = tuple[torch.Tensor, torch.Tensor]
"""States [tokens, layers, hidden], token ids [tokens]."""


def states_of(root: Path, digest: str) -> dict[str, Row]:
    """Each row of a states artifact by its key, in order."""
    rows = read_rows((root / "objects" / digest[:2] / digest / ROWS).read_text("utf-8"))
    places = StateIndex(root / "registry.sqlite").places([row.key for row in rows])
    reader = ShardReader(root)
    return {row.key: reader.read(places[row.key]) for row in rows}


def cosines(ours: Row, theirs: Row) -> torch.Tensor:
    """Cosine of each token and layer."""
    assert torch.equal(ours[1], theirs[1]), "the same tokens"
    assert ours[0].shape == theirs[0].shape
    return torch.nn.functional.cosine_similarity(ours[0].float(), theirs[0].float(), dim=-1)
