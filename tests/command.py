"""The command line as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import outputs


def kimi_eagle(root: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the CLI as a user would, with --json; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "kimi_eagle", "--root", str(root), *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    outputs.check([*arguments, "--json"], code, done.stdout)
    return json.loads(done.stdout)


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in document["stages"]}
