"""The vocabulary map between verifier and draft, as stored and as checked. Imports torch.

`t2d`: bool [verifier vocab], which tokens the draft knows. `d2t`: int64 [draft vocab], offsets:
draft id i stands for verifier id i + d2t[i] (speculators' and vLLM's convention; other tools store
absolute ids). The whole vocabulary is stored as t2d all true and d2t all 0, and used as no map.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FILE = "vocab.safetensors"
REPORT = "report.json"


class BadVocab(ValueError):
    """A map that does not hold together; the message gives both numbers."""


@dataclass(frozen=True)
class VocabMap:
    """A checked map; both tensors are None where a draft with the whole vocabulary is trained."""

    t2d: Any
    d2t: Any
    verifier_size: int
    draft_size: int


def check_map(t2d: Any, d2t: Any, verifier_size: int, draft_size: int) -> VocabMap:
    """Normalise a map's dtypes and refuse one that does not hold together.

    `t2d` may be bool or integers 0 and 1; `d2t` any integers, as offsets.

    Raises:
        BadVocab: another length, count, value or dtype than the map must have; absolute ids.
    """
    if t2d.shape != (verifier_size,):
        raise BadVocab(f"t2d has shape {list(t2d.shape)} for a verifier vocab of {verifier_size}")
    if d2t.shape != (draft_size,):
        raise BadVocab(f"d2t has shape {list(d2t.shape)} for a draft vocab of {draft_size}")
    if t2d.dtype != torch.bool:
        if t2d.is_floating_point() or not bool(((t2d == 0) | (t2d == 1)).all()):
            found = t2d.unique().tolist()[:4]
            raise BadVocab(f"t2d must be bool, or whole 0 and 1; found {t2d.dtype} with {found}")
        t2d = t2d.bool()
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise BadVocab(f"d2t must be integers, found {d2t.dtype}")
    d2t = d2t.to(torch.int64)
    count = int(t2d.sum())
    if count != draft_size:
        raise BadVocab(f"t2d marks {count} tokens for a draft vocab of {draft_size}")
    marked = t2d.nonzero().flatten()
    if not torch.equal(torch.arange(draft_size) + d2t, marked):
        absolute = torch.equal(d2t, marked)
        raise BadVocab(
            "d2t holds absolute ids; offsets are needed (verifier id minus draft id)"
            if absolute
            else "d2t does not point to the tokens that t2d marks"
        )
    return VocabMap(t2d, d2t, verifier_size, draft_size)


def save_map(folder: Path, selected: list[int], verifier_size: int) -> None:
    t2d = torch.zeros(verifier_size, dtype=torch.bool)
    t2d[selected] = True
    d2t = torch.tensor(selected, dtype=torch.int64) - torch.arange(len(selected))
    check_map(t2d, d2t, verifier_size, len(selected))
    save_file({"t2d": t2d, "d2t": d2t}, folder / FILE)


def load_map(folder: Path) -> VocabMap:
    """The map of a `vocab` artifact; that of the whole vocabulary is none.

    Raises:
        BadVocab: see `check_map`.
    """
    report = json.loads((folder / REPORT).read_text("utf-8"))
    whole, size = report["verifier_vocab_size"], report["size"]
    if not (folder / FILE).exists():
        if size != whole:
            raise BadVocab(f"{FILE} is missing for a draft vocab of {size} out of {whole}")
        return VocabMap(None, None, whole, whole)
    tensors = load_file(folder / FILE)
    if set(tensors) != {"t2d", "d2t"}:
        raise BadVocab(f"{FILE} must hold t2d and d2t, found {', '.join(sorted(tensors))}")
    found = check_map(tensors["t2d"], tensors["d2t"], whole, size)
    return found if size != whole else VocabMap(None, None, whole, whole)
