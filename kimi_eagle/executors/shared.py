"""What a task on another machine leaves in its folder: a sign of life, and how it ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from kimi_eagle.executors.guard import EXIT, HEARTBEAT
from kimi_eagle.executors.protocol import Task

# A guard gives a sign of life every other second; this long without one, on a file system over a
# network too, it has none.
SILENCE_SECONDS = 60.0


def command(task: Task, python: str | None) -> list[str]:
    """The command line of a task for a scheduler."""
    guard = ["-m", "kimi_eagle.executors.guard", "--folder", str(task.folder), str(task.usage)]
    return [python or sys.executable, *guard, *task.arguments]


def environment(task: Task) -> dict[str, str]:
    """The environment variables of a task for a scheduler: its settings, and those of the
    coordinator that say which code is run and how it counts threads."""
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    path = os.environ.get("PYTHONPATH")
    if path:
        kept["PYTHONPATH"] = os.pathsep.join(
            str(Path(part).absolute()) for part in path.split(os.pathsep) if part
        )
    return {**kept, **task.settings}


def exit_code(folder: Path) -> int | None:
    """The code that a task ended with; None when it has not said."""
    try:
        return int(json.loads((folder / EXIT).read_text("utf-8"))["code"])
    except (OSError, ValueError, KeyError):
        return None


def silence(folder: Path) -> float | None:
    """Seconds since a task's last sign of life; None when it has given none.

    Both times are the file system's own: clocks of two machines may differ.
    """
    try:
        last = (folder / HEARTBEAT).stat().st_mtime
        probe = folder / ".now"
        probe.touch()
        return max(0.0, probe.stat().st_mtime - last)
    except OSError:
        return None


class Clock:
    """Says when to ask a scheduler again: it is not to be asked at every look at a file."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._next = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
