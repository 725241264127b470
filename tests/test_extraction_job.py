"""What an engine's program is told: memory between it and its writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DEMO

from kimi_eagle.engines.extraction import extraction_job
from kimi_eagle.engines.todo import Todo
from kimi_eagle.stages.extract.spec import ExtractParams
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.verifiers.folder import open_folder

KIMI = LayerContract((2, 30, 58, 61), 7168, "bfloat16", "vllm")
TOKEN = 57_344 + 4  # with its id


def job(folder: Path, length: int, **engine: Any) -> dict[str, Any]:
    Todo.write(folder / "rows.npz", {f"{0:064x}": np.arange(length), f"{1:064x}": np.arange(3)})
    params = ExtractParams.model_validate({"kind": "extract", "rows": "rows", "engine": engine})
    paths = (folder / "rows.npz", folder / "shards", folder / "events.ndjson")
    return extraction_job(open_folder(DEMO / "verifier"), KIMI, params, *paths)


@pytest.mark.parametrize(
    ("length", "batched", "tokens"),
    [(100, 1024, 0), (100, 8192, 6 * 8192), (40_000, 8192, 2 * 40_000)],
    ids=["a GiB at least", "six passes", "two rows that are longer"],
)
def test_memory_holds_what_is_under_way(
    tmp_path: Path, length: int, batched: int, tokens: int
) -> None:
    made = job(tmp_path, length, kind="vllm", max_batched_tokens=batched)
    least = tokens * TOKEN if tokens else 1 << 30
    assert least <= made["ring_bytes"] < least + 1024


def test_memory_is_what_the_manifest_says(tmp_path: Path) -> None:
    assert job(tmp_path, 40_000, kind="vllm", buffer_mib=16)["ring_bytes"] == 16 << 20


def test_transformers_is_told_nothing_of_it(tmp_path: Path) -> None:
    assert "ring_bytes" not in job(tmp_path, 100, kind="transformers")
