"""What a task on other machines leaves in its folder: signs of life, and how it ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from kimi_eagle.executors.guard import EXIT, HEARTBEAT, of_node
from kimi_eagle.executors.protocol import Task, TaskLost
from kimi_eagle.nodes import NODES

# A guard gives a sign of life every other second; this long without one, on a file system over a
# network too, it has none.
SILENCE_SECONDS = float(os.environ.get("KIMI_EAGLE_SILENCE_SECONDS", "60"))


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
    if task.needs.nodes > 1:
        kept[NODES] = str(task.needs.nodes)
    return {**kept, **task.settings}


def exit_code(task: Task) -> int | None:
    """The code that a task ended with; None when it, or one of its nodes, has not said.

    Raises:
        TaskLost: of several nodes one's worker was killed, by nobody of ours.
    """
    said = [_ended(task.folder / of_node(EXIT, node)) for node in range(task.needs.nodes)]
    if len(said) > 1:
        for node, (code, peer) in enumerate(said):
            if code is not None and code > 128 and peer is None:
                silent = [str(other) for other, (code, _) in enumerate(said) if code is None]
                raise TaskLost(
                    f"its worker on node {node} was ended by signal {code - 128}"
                    + (f", nothing was heard of node {' and '.join(silent)}" if silent else "")
                )
    codes = [code for code, _ in said]
    if None in codes:
        return None
    # That of the one which failed says more than those of others that were ended for it.
    own = [code for code, peer in said if code and peer is None]
    return next(iter(own), max(code or 0 for code in codes))


def over(task: Task) -> bool:
    """Whether nothing of a task can go on any more."""
    names = (of_node(EXIT, node) for node in range(task.needs.nodes))
    return all(_ended(task.folder / name)[0] is not None for name in names)


def _ended(path: Path) -> tuple[int | None, int | None]:
    """The code that a worker ended with, and the node because of which it was ended."""
    try:
        said = json.loads(path.read_text("utf-8"))
        return int(said["code"]), said.get("because")
    except (OSError, ValueError, KeyError):
        return None, None


def silence(task: Task) -> float | None:
    """Seconds since a task's last sign of life, of several nodes' the one that is silent longest;
    None when it has given none.

    Both times are the file system's own: clocks of two machines may differ.
    """
    folder, nodes = task.folder, range(task.needs.nodes)
    try:
        last = min(
            (folder / of_node(HEARTBEAT, node)).stat().st_mtime
            for node in nodes
            if _ended(folder / of_node(EXIT, node))[0] is None or len(nodes) == 1
        )
        probe = folder / ".now"
        probe.touch()
        return max(0.0, probe.stat().st_mtime - last)
    except (OSError, ValueError):
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
