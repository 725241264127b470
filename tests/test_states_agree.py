"""Hidden states of a row, whatever engine, batch or number of ranks they come from: slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from agreement import Row, cosines, states_of
from command import by_name, kimi_eagle

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


def states(root: Path, stages: Stages) -> dict[str, Row]:
    return states_of(root, stages["states"]["outputs"]["states"])


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
