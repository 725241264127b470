"""Work that is given to an executor and followed to its end: its events passed on, its shards,
answers and snapshots taken in as they come."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.executors.guard import EXIT, of_node
from kimi_eagle.executors.protocol import Executor, ExecutorError, Running, Task, TaskLost
from kimi_eagle.harvest import StateStore, take_left, take_shard
from kimi_eagle.job import (
    ANSWERS,
    EVENTS,
    NO_SPACE,
    SHARDS,
    SNAPSHOTS,
    EventReader,
    Job,
    StageFailed,
)
from kimi_eagle.kept_answers import take_answers
from kimi_eagle.manifest.execution import Execution
from kimi_eagle.orphans import USAGE, Note
from kimi_eagle.placement import needs_of
from kimi_eagle.plan import StagePlan
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import StageParams

# Takes in what a worker has saved: (job folder, event).
Take = Callable[[Path, Mapping[str, Any]], None]
# A cluster that is away when lost work is to be given out again may come back this soon.
AWAY_SECONDS = float(os.environ.get("KIMI_EAGLE_AWAY_SECONDS", "300"))
_LOG_LINES = 40
# What several processes used, and how that comes together.
ADDED = (("cpu_seconds", sum), ("peak_memory_bytes", max))


class Told(Protocol):
    """Who is told how a stage goes."""

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


class Errand:
    """Gives work out under one root."""

    def __init__(
        self,
        states: StateStore,
        digests: Digests,
        reporter: Told,
        execution: Execution,
        executor: Executor,
    ):
        self._states = states
        self._digests = digests
        self._reporter = reporter
        self._execution = execution
        self._executor = executor

    def telling(self, told: Told) -> Errand:
        """The same, telling another."""
        return Errand(self._states, self._digests, told, self._execution, self._executor)

    def submitted(
        self, stage: StagePlan, params: StageParams, job: Job, log: Path, *, again: bool
    ) -> Generator[None, None, Running]:
        """Give a job's worker to the executor.

        Args: `again`: it was given out before, so that the executor is worth waiting for.

        Raises: ExecutorError.
        """
        folder = Path(job.folder)
        task = Task(
            folder.name,
            ("-m", "kimi_eagle.worker", str(job.write())),
            folder,
            log,
            folder / USAGE,
            KINDS[stage.kind].settings,
            needs_of(params.resources),
        )
        where = self._execution.model_dump(mode="json")
        nodes = params.resources.nodes
        note = Note(stage.name, str(stage.key), job.share, str(log), where, {}, nodes)
        if self._executor.remote:
            note.write(folder)
        deadline = time.monotonic() + (AWAY_SECONDS if again else 0)
        while True:
            try:
                running = self._executor.submit(task)
                break
            except ExecutorError:
                if time.monotonic() >= deadline:
                    raise
            yield
        if self._executor.remote:
            replace(note, handle=dict(running.handle)).write(folder)
        return running

    def work(
        self, stage: StagePlan, running: Running, folder: Path, take: Take
    ) -> Generator[None, None, int]:
        """Follow a worker to its end; whatever stops us, stops it. Raises: TaskLost."""
        events = EventReader(folder / EVENTS)
        lost = False
        try:
            return (yield from self._follow(stage, running, folder, events, take))
        except TaskLost:
            lost = True
            raise
        finally:
            running.cancel()
            # What it saved when it was asked to stop.
            for event in events.new():
                if event["event"] == "snapshot" and (folder / SNAPSHOTS / event["name"]).exists():
                    take(folder, event)
            with suppress(OSError):  # a full disk, most likely: the stage says so itself
                shards = folder / SHARDS
                if lost and shards.is_dir():
                    # It may write on where nobody can see it: what is published is a copy.
                    shards = folder / "left" / SHARDS
                    shutil.copytree(folder / SHARDS, shards)
                take_left(self._states, self._digests, shards)

    def _follow(
        self, stage: StagePlan, running: Running, folder: Path, events: EventReader, take: Take
    ) -> Generator[None, None, int]:
        """Pass events on and take shards and snapshots in until the job ends; returns its exit
        code. What is not there was taken in already, by the coordinator before this one."""
        told = None
        while True:
            code = running.poll()
            waiting = running.waiting()
            if waiting is not None and waiting != told:
                told = waiting
                self._reporter.note(f"{stage.name}: {waiting}")
            for event in events.new():
                if event["event"] == "shard":
                    if (folder / SHARDS / event["name"]).exists():
                        take_shard(self._states, self._digests, folder / SHARDS / event["name"])
                elif event["event"] == "answers":
                    if (folder / ANSWERS / event["name"]).exists():
                        take_answers(
                            self._states.root,
                            self._digests,
                            folder / ANSWERS / event["name"],
                            event["set"],
                        )
                elif event["event"] == "snapshot":
                    if (folder / SNAPSHOTS / event["name"]).exists():
                        take(folder, event)
                else:
                    self._reporter.stage_event(stage, event)
            if code is not None:
                return code
            yield


def used(folder: Path) -> dict[str, Any]:
    """What the worker used, as the executor wrote it down, and on another machine its `host`; empty
    when it could not. Of several nodes CPU time adds up, and the memory is that of the largest."""
    found: dict[str, Any] = {}
    hosts: list[str] = []
    node = 0
    while node == 0 or (folder / of_node(EXIT, node)).exists():
        for name in (USAGE, EXIT):
            with suppress(OSError, ValueError):
                said = json.loads((folder / of_node(name, node)).read_text("utf-8"))
                for figure, add in ADDED:
                    if figure in said:
                        found[figure] = add((found.get(figure, 0), said[figure]))
                hosts += [said["host"]] if "host" in said else []
        node += 1
    return {**found, "host": ", ".join(dict.fromkeys(hosts))} if hosts else found


def came_to_its_end(what: str, code: int, result: Mapping[str, Any] | None, log: Path) -> None:
    """Raises: StageFailed, with what the worker said or else the end of its log."""
    if result is not None and "error" in result:
        raise StageFailed(str(result["error"]))
    if code == NO_SPACE:
        raise StageFailed(
            f"no space left for {what} to write to: free some and submit again; what was "
            "published is kept"
        )
    if code != 0 or result is None:
        signalled = code - 128 if code > 128 else -code
        how = f"was ended by signal {signalled}" if signalled > 0 else f"ended with code {code}"
        raise StageFailed(f"the worker of {what} {how}; the end of its log:\n{log_tail(log)}")


def log_tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
