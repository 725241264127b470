"""Follow a run from outside: its stages from the registry, their events and logs from the disk.

Nothing here speaks to the coordinator, so that following a run changes nothing about it.
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.coordinator import RUNNING, as_it_is, ended_with
from kimi_eagle.job import EVENTS, EventReader
from kimi_eagle.outcome import Reporter, RunOutcome, StageOutcome
from kimi_eagle.plan import StagePlan
from kimi_eagle.records import ExecutionRecord, RunRecord
from kimi_eagle.registry.store import Registry

POLL_SECONDS = 0.3
_CHUNK = 1 << 16


def stage_log(root: Path, run_id: str, stage: str) -> Path:
    """Where what a stage prints is kept."""
    return root / run_id / "stages" / f"{stage}.log"


class StageEvents(EventReader):
    """The events of one stage of a run: in its staging folder while it runs, then kept."""

    def __init__(self, root: Path, run_id: str, stage: str):
        self._kept = root / run_id / "stages" / f"{stage}.events"
        self._staging = root / STAGING
        self._attempt = f"{run_id}-{stage}-"
        super().__init__(self._kept)

    def lines(self) -> list[bytes]:
        self._path = self.place
        return super().lines()

    @property
    def place(self) -> Path:
        """Where the events are now; the copy that is kept goes on where the other ended."""
        for folder in self._staging.glob(f"{self._attempt}*"):
            # Another stage's name may go on where this one's ends: the rest is one token.
            if "-" not in folder.name.removeprefix(self._attempt) and (folder / EVENTS).exists():
                return folder / EVENTS
        return self._kept


class RunFollower:
    """Tells a reporter how a run goes, as its own coordinator would."""

    def __init__(self, root: Path, registry: Registry, run: RunRecord, reporter: Reporter):
        self._root = root
        self._registry = registry
        self._reporter = reporter
        self._run = run
        self._told = False
        self._events: dict[int, StageEvents] = {}
        self._ended: set[int] = set()

    def step(self) -> RunRecord:
        """Pass on what is new; returns the run as it was just before."""
        # The run first: once it has ended, no stage of it changes any more.
        run = as_it_is(
            self._root, self._registry.run(self._run.id) or self._run, self._registry.run
        )
        if not self._told:
            self._told = True
            self._reporter.run_started(run.id, self._root / run.id)
        for stage in ended_with(run, self._registry.stages_of(run.id)):
            if stage.id not in self._ended:
                self._pass_on(stage)
        return run

    def watch(self) -> RunRecord:
        """Pass on all that comes until the run ends."""
        while True:
            run = self.step()
            if run.status != RUNNING:
                return run
            time.sleep(POLL_SECONDS)

    def outcome(self, run: RunRecord) -> RunOutcome:
        """How a run came out, as `submit` returns it."""
        stages = ended_with(run, self._registry.stages_of(run.id))
        return RunOutcome(run.id, run.status, [outcome_of(self._root, stage) for stage in stages])

    def _pass_on(self, stage: ExecutionRecord) -> None:
        plan = StagePlan(stage.stage, stage.kind, key=stage.key)
        if stage.reused_from is not None:
            self._ended.add(stage.id)
            self._reporter.stage_reused(plan, self._registry.execution(stage.reused_from))
            return
        over = stage.disposition != RUNNING
        if stage.id not in self._events:
            self._events[stage.id] = StageEvents(self._root, stage.run_id, stage.stage)
            if not over:
                self._reporter.stage_started(plan)
        for event in _worth_telling(list(self._events[stage.id].new()), over=over):
            self._reporter.stage_event(plan, event)
        if over:
            self._ended.add(stage.id)
            self._reporter.stage_ended(outcome_of(self._root, stage))


def outcome_of(root: Path, stage: ExecutionRecord) -> StageOutcome:
    """A recorded stage as `submit` reports it."""
    return StageOutcome(
        stage.stage,
        stage.kind,
        stage.disposition,
        str(stage.key),
        stage.outputs,
        stage.metrics,
        stage.seconds or 0.0,
        stage.error,
        stage_log(root, stage.run_id, stage.stage),
        stage.resources,
    )


def _worth_telling(events: list[dict[str, Any]], *, over: bool) -> list[dict[str, Any]]:
    """Of what piled up, all notes, and of what only shows the present, the last of each."""
    last = {_sort(event): number for number, event in enumerate(events)}
    return [
        event
        for number, event in enumerate(events)
        if event["event"] == "note" or (not over and last[_sort(event)] == number)
    ]


def _sort(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["event"], event.get("split")


def stages_named(registry: Registry, run_id: str) -> list[str]:
    """The stages of a run's manifest, begun or not, in its order."""
    return list(json.loads(registry.run_texts(run_id)["resolved"])["stages"])


def follow_text(path: Path, over: Callable[[], bool]) -> Iterator[str]:
    """What a file holds and comes to hold, until `over`; it need not be there yet."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    offset = 0
    while True:
        # Asked before the file is read: what was written before the end is in it.
        ended = over()
        while data := _read(path, offset):
            offset += len(data)
            yield decode(data)
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_CHUNK)
    except FileNotFoundError:
        return b""
