"""Extraction that is broken off goes on where it was; with a real engine, so slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

DEMO = Path(__file__).resolve().parent.parent / "kimi_eagle" / "demo"

pytestmark = pytest.mark.slow


def manifest(folder: Path) -> Path:
    path = folder / "extract.yaml"
    source = {"path": str(DEMO / "chats.jsonl"), "limit": 60}
    stages = {
        "rows": {"kind": "prepare", "sources": [source], "max_length": 512},
        "states": {
            "kind": "extract",
            "rows": "rows",
            "layers": [2, 4, 5],
            "engine": {"kind": "transformers"},
        },
    }
    document = {
        "version": 1,
        "name": "broken-off",
        "verifier": {"path": str(DEMO / "verifier")},
        "stages": stages,
    }
    path.write_text(yaml.safe_dump(document), "utf-8")
    return path


def start(root: Path, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kimi_eagle", "--root", str(root), "submit", str(path)]
    return subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)


def states_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)["stages"][-1]
    return found


def rows_written(root: Path) -> int:
    """How many rows the attempt under way has in shards."""
    journals = (root / ".staging").glob("*/shards/journal-*.ndjson")
    proved = list((root / ".staging").glob("*/shards/proved"))
    return sum(text.read_text("utf-8").count('"row"') for text in journals) if proved else 0


def test_rows_that_were_written_before_a_kill_are_not_run_again(tmp_path: Path) -> None:
    # EXT-10: killed runner and all, in the middle of a shard that is far from full
    path = manifest(tmp_path)
    whole = states_of(start(tmp_path / "unbroken", path))
    assert whole["metrics"]["rows_extracted"] > 30
    root = tmp_path / "broken"
    process = start(root, path)
    until = time.monotonic() + 300
    while (written := rows_written(root)) < 20:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = states_of(start(root, path))
    assert again["outputs"] == whole["outputs"]
    assert again["metrics"]["rows_extracted"] <= whole["metrics"]["rows_extracted"] - written
