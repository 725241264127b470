"""Hidden states of a row, whatever engine, batch or number of ranks they come from: slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import by_name, kimi_eagle

from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import read_rows
from kimi_eagle.states.reader import ShardReader

pytestmark = pytest.mark.slow

Stages = dict[str, dict[str, Any]]


def extracted(root: Path, small: Path, engine: dict[str, Any], folder: Path) -> Stages:
    """The rows of `small`, and their states by this engine."""
    manifest = yaml.safe_load(small.read_text("utf-8"))
    stages = manifest["stages"]
    manifest["stages"] = {
        "rows": stages["rows"],
        "states": {**stages["states"], "engine": engine},
    }
    path = folder / "extract.yaml"
    path.write_text(yaml.safe_dump(manifest), "utf-8")
    found = by_name(kimi_eagle(root, "submit", str(path)))
    assert found["states"]["disposition"] == "executed"
    return found


def states(root: Path, stages: Stages) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(states, token ids) of each row by its key, in order."""
    digest = stages["states"]["outputs"]["states"]
    text = (root / "objects" / digest[:2] / digest / "rows.txt").read_text("utf-8")
    keys = [row.key for row in read_rows(text)]
    places, reader = StateIndex(root / "registry.sqlite").places(keys), ShardReader(root)
    return {key: reader.read(places[key]) for key in keys}


def cosines(
    ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Cosine of each token and layer."""
    assert torch.equal(ours[1], theirs[1])
    return torch.nn.functional.cosine_similarity(ours[0].float(), theirs[0].float(), dim=-1)


def test_vllm_and_transformers_agree(
    store: Path, small: Path, first: Stages, tmp_path: Path
) -> None:
    """The reference engine, row by row: as bf16 and MoE allow."""
    reference = extracted(store, small, {"kind": "transformers"}, tmp_path)
    pairs = zip(states(store, first).values(), states(store, reference).values(), strict=True)
    for ours, theirs in pairs:
        found = cosines(ours, theirs)
        assert float(found.mean()) > 0.995
        assert float(found.min()) > 0.9


def test_placement_changes_no_key_and_hardly_a_number(
    store: Path, small: Path, first: Stages, tmp_path: Path
) -> None:
    """Every rank has every state: one of them writes, each row once. EXT-02: what else is in a
    batch does not leak into a row's states."""
    root = tmp_path / "root"
    engine = {"kind": "vllm", "tensor_parallel": 2, "max_batched_tokens": 16}
    again = extracted(root, small, engine, tmp_path)
    assert again["states"]["key"] == first["states"]["key"]
    metrics = again["states"]["metrics"]
    assert metrics["rows_extracted"] == metrics["rows"]
    here, there = states(store, first), states(root, again)
    assert list(here) == list(there)
    for key, ours in here.items():
        assert float(cosines(ours, there[key]).min()) > 0.95
