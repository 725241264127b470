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


def manifest(folder: Path, source: dict[str, Any] | None = None, **rows: Any) -> Path:
    path = folder / "extract.yaml"
    source = source or {"path": str(DEMO / "chats.jsonl"), "limit": 60}
    stages = {
        "rows": {"kind": "prepare", "sources": [source], "max_length": 512, **rows},
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


def test_one_conversation_more_costs_one_and_another_order_none(tmp_path: Path) -> None:
    # Of 100 conversations: tokens that went through the engine, not rows that came out.
    lines = (DEMO / "chats.jsonl").read_text("utf-8").splitlines()
    chats = tmp_path / "chats.jsonl"

    def extracted(chosen: list[str], **rows: Any) -> dict[str, Any]:
        chats.write_text("\n".join(chosen) + "\n", "utf-8")
        return dict(states_of(start(root, manifest(tmp_path, {"path": str(chats)}, **rows))))

    root = tmp_path / "runs"
    whole = extracted(lines[:100])
    more = extracted(lines[:101])
    assert more["disposition"] == "executed"
    share = more["metrics"]["tokens_extracted"] / whole["metrics"]["tokens_extracted"]
    assert 0 < share <= 0.02
    assert more["metrics"]["rows"] > whole["metrics"]["rows"]
    other = extracted([*reversed(lines[:101]), lines[0]], val_ratio=0.3)
    assert other["metrics"]["tokens_extracted"] == 0
    assert other["outputs"] != more["outputs"]
