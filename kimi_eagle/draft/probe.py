"""Whether what training aims at is what the verifier would say. Imports torch.

The aims are computed twice: by the model that is trained, and from the head artifact's tensors
apart, by the textbook: lm_head(norm(last state)), restricted to the draft's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from kimi_eagle.draft.batches import PackedBatch
from kimi_eagle.draft.losses import Heads
from kimi_eagle.draft.model import HEAD, HEAD_FILE, NORM
from kimi_eagle.draft.vocab import VocabMap

POSITIONS = 512
# Rows of the verifier's head that are multiplied at once.
_ROWS = 16384


@dataclass(frozen=True)
class Agreement:
    """Shares of the probed positions."""

    positions: int
    aims: float
    """Where both ways aim at the same token."""
    next_token: float
    """Where the verifier's most likely token, of its whole vocabulary, is the row's next one:
    near 1 for rows that the verifier itself wrote, greedily."""
    in_vocab: float
    """Where that most likely token is one that the draft knows."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def probe(batch: PackedBatch, heads: Heads, head: Path, vocab: VocabMap, eps: float) -> Agreement:
    """Probe the first supervised positions of a batch.

    Args: `head`: the head artifact; `eps`: of the verifier's norm.
    """
    at = batch.starts[0][:POSITIONS]
    aims = heads.aims(batch).tokens[: len(at)]
    states = batch.last_states.index_select(0, at).float()
    device = states.device
    with safe_open(head / HEAD_FILE, framework="pt") as file:
        norm = file.get_tensor(NORM).float().to(device)
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * norm
        whole = file.get_slice(HEAD)
        parts = []
        for first in range(0, vocab.verifier_size, _ROWS):
            rows = whole[first : min(first + _ROWS, vocab.verifier_size)]
            parts.append(normed @ rows.to(device).float().T)
    logits = torch.cat(parts, dim=1)
    likeliest = logits.argmax(-1)
    if vocab.t2d is not None:
        known = vocab.t2d.to(device)
        restricted = logits[:, known].argmax(-1)
        inside = known[likeliest]
    else:
        restricted, inside = likeliest, torch.ones_like(likeliest, dtype=torch.bool)
    # The token after a position's own, where that is of the same row.
    following = (at + 1).clamp(max=len(batch.input_ids) - 1)
    same = batch.document_ids[following] == batch.document_ids[at]
    right = (likeliest == batch.input_ids[following])[same]
    return Agreement(
        len(at),
        float((aims == restricted).float().mean()),
        float(right.float().mean()) if len(right) else 0.0,
        float(inside.float().mean()),
    )
