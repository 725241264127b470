"""The demo made again in a root of its own, a small one in clusters: slow, run by `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import by_name, kimi_eagle
from conftest import MANIFESTS
from ray_cluster import at

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cluster", ["slurm", "ray"])
def test_the_whole_way_in_a_cluster_makes_what_it_makes_here(
    cluster: str,
    request: pytest.FixtureRequest,
    small: Path,
    first: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    if cluster == "slurm":
        request.getfixturevalue("at_slurm")
        where = ["--executor", "slurm"]
    else:
        where = at(request.getfixturevalue("ray"))
    there = by_name(kimi_eagle(tmp_path, "submit", str(small), *where))
    assert {stage["disposition"] for stage in there.values()} == {"executed"}
    assert {n: s["outputs"] for n, s in there.items()} == {
        n: s["outputs"] for n, s in first.items()
    }


def test_a_checkpoint_comes_out_the_same_from_its_record_alone(
    store: Path, demo: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Bitwise, in a fresh root that is given the exported record and the sources: extraction,
    training and all."""
    (checkpoint,) = demo["draft"]["outputs"].values()
    command = [sys.executable, "-m", "kimi_eagle", "--root", str(store), "record", checkpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record = tmp_path / "record.json"
    record.write_text(done.stdout, "utf-8")
    arguments = ("--record", str(record), "--sources", str(MANIFESTS))
    found = kimi_eagle(tmp_path / "root", "reproduce", checkpoint, *arguments)
    assert found["status"] == "identical", found
    assert {stage["status"] for stage in found["stages"]} == {"identical"}
    assert len(found["stages"]) == 5
