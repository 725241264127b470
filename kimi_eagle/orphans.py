"""Tasks that go on when their coordinator dies: a note in their folder, by which another finds them
again, follows them to their end and takes in what they made.

    <root>/.staging/<run>-<stage>-<token>/task.json

It is written before the task is submitted, and again with what the scheduler calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.artifacts.locks import held
from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.eviction import ALIVE
from kimi_eagle.executors.guard import HEARTBEAT, of_node
from kimi_eagle.executors.protocol import Executor, Needs, Running, Task
from kimi_eagle.job import Share

NOTE = "task.json"
USAGE = "usage.json"


@dataclass(frozen=True)
class Note:
    """What is to be known of a task that was submitted."""

    stage: str
    key: str
    share: Share | None
    """The part of the stage's rows; None for all of it."""
    log: str
    execution: Mapping[str, Any]
    """Where it runs, as its manifest said."""
    handle: Mapping[str, Any]
    """What it is called there; empty until that is known."""
    nodes: int = 1
    """How many it has at once."""

    def write(self, folder: Path) -> None:
        write_json(folder / NOTE, asdict(self))


@dataclass(frozen=True)
class Orphan:
    """A task whose coordinator is gone."""

    folder: Path
    run_id: str
    note: Note

    def task(self) -> Task:
        """As far as it takes to be found and followed."""
        log = Path(self.note.log)
        needs = Needs(nodes=self.note.nodes)
        return Task(self.folder.name, (), self.folder, log, self.folder / USAGE, needs=needs)

    def give_up(self) -> None:
        """Nobody follows it any more: what it left whole is taken in as that of any run that died,
        and should it be out of reach, its guard sees this and ends it."""
        signs = (of_node(HEARTBEAT, node) for node in range(self.note.nodes))
        for name in (*signs, NOTE):
            (self.folder / name).unlink(missing_ok=True)

    def found(self, executor: Executor) -> Running:
        """Raises: ExecutorError."""
        return executor.find(self.task(), self.note.handle)


def orphans(root: Path, own: str | None = None) -> Iterator[Orphan]:
    """Those under a root, ended ones included whose outputs nobody took in.

    Args: `own`: a run that was taken over: what it gave out before is an orphan though it lives.
    """
    staging = root / STAGING
    for folder in sorted(staging.iterdir()) if staging.is_dir() else ():
        run_id = folder.name.split("-")[0]
        if run_id != own and held(root / run_id / ALIVE):
            continue
        try:
            values = json.loads((folder / NOTE).read_text("utf-8"))
            share = values.pop("share")
            note = Note(share=(share[0], share[1]) if share else None, **values)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        yield Orphan(folder, run_id, note)
