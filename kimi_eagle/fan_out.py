"""The rows of one stage, shared out over several workers.

Each worker runs the stage's own code over its share of the rows, and what it finishes is taken into
the store as that of any worker. None makes an artifact: once all are done, the stage itself finds
everything there, and lists it. So the shares leave no trace in what is made, and a share that is
lost is no more than rows that are still to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.errand import ADDED, Errand, Told, came_to_its_end, used
from kimi_eagle.executors.protocol import Executor, TaskLost
from kimi_eagle.job import Job, Share, StageFailed, read_result
from kimi_eagle.orphans import Orphan
from kimi_eagle.outcome import Reporter
from kimi_eagle.plan import StagePlan
from kimi_eagle.stages.contract import StageParams


@dataclass(frozen=True)
class Part:
    """What a worker did of its share."""

    metrics: Mapping[str, Any]
    used: Mapping[str, Any]
    """Of its machine."""


@dataclass(frozen=True)
class FanOut:
    """How the shares of one stage are worked on."""

    stage: StagePlan
    params: StageParams
    attempt: str
    """Their names begin with it."""
    log: Path
    errand: Errand
    executor: Executor
    reporter: Reporter
    retries: int
    staging: Callable[[str], AbstractContextManager[Path]]
    job: Callable[[Path, Share], Job]
    """The job of a share in a folder."""
    adopted: Mapping[Share, Orphan]
    """Shares that another coordinator gave out."""

    def steps(self, workers: int) -> Generator[None, None, list[Part]]:
        """All shares, side by side. Raises: StageFailed."""
        progress = _Progress(self.reporter, self.stage)
        running = {
            number: self._share((number, workers), progress.of(number)) for number in range(workers)
        }
        done: dict[int, Part] = {}
        with ExitStack() as stack:
            for steps in running.values():
                stack.callback(steps.close)
            while len(done) < workers:
                for number, steps in running.items():
                    if number not in done:
                        try:
                            next(steps)
                        except StopIteration as end:
                            done[number] = end.value
                yield
        return [done[number] for number in range(workers)]

    def _share(self, share: Share, told: Told) -> Generator[None, None, Part]:
        lost, orphan = 0, self.adopted.get(share)
        what = f"{self.stage.name} ({share[0] + 1} of {share[1]})"
        log = self.log.with_name(f"{self.stage.name}.{share[0] + 1}-of-{share[1]}.log")
        errand = self.errand.telling(told)
        while True:
            name = f"{self.attempt}.part{share[0]}" + (f".{lost}" if lost else "")
            with self.staging(orphan.folder.name if orphan else name) as folder:
                try:
                    if orphan is not None:
                        at_log, running = Path(orphan.note.log), orphan.found(self.executor)
                    else:
                        at_log, job = log, self.job(folder, share)
                        running = yield from errand.submitted(
                            self.stage, self.params, job, log, again=lost > 0
                        )
                    code = yield from errand.work(self.stage, running, folder, _refuse)
                    result = read_result(folder)
                    came_to_its_end(what, code, result, at_log)
                    assert result is not None
                    return Part(result["metrics"], used(folder))
                except TaskLost as problem:
                    lost, orphan = lost + 1, None
                    if lost > self.retries:
                        raise StageFailed(
                            f"{what}: {problem}; that was attempt {lost}, and the last one"
                        ) from None
                    self.reporter.note(
                        f"{what}: {problem}; beginning it again ({lost} of {self.retries})"
                    )


def _refuse(_folder: Path, event: Mapping[str, Any]) -> None:
    raise StageFailed(f"{event['name']} was saved, and nobody asked for it")


class _Progress:
    """Adds up how far the workers of one stage are."""

    def __init__(self, reporter: Reporter, stage: StagePlan):
        self._reporter = reporter
        self._stage = stage
        self._far: dict[int, tuple[int, int]] = {}

    def of(self, number: int) -> Told:
        return _OfOne(self, number, self._reporter)

    def took(self, number: int, event: Mapping[str, Any]) -> None:
        self._far[number] = event["done"], event["total"]
        done, total = (sum(figures) for figures in zip(*self._far.values(), strict=True))
        whole = {"event": "progress", "done": done, "total": total, "unit": event["unit"]}
        self._reporter.stage_event(self._stage, whole)


class _OfOne:
    """The reporter of one worker: what it tells is told of all."""

    def __init__(self, progress: _Progress, number: int, reporter: Reporter):
        self._progress = progress
        self._number = number
        self._reporter = reporter

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None:
        if event["event"] == "progress":
            self._progress.took(self._number, event)
        else:
            self._reporter.stage_event(stage, event)

    def note(self, text: str) -> None:
        self._reporter.note(text)


def together(used: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """What a stage used of machines, its workers' part included: CPU time adds up, and the memory
    is that of the largest."""
    every = [used, *(part.used for part in parts)]
    found = dict(used)
    for name, add in ADDED:
        values = [item[name] for item in every if name in item]
        if values:
            found[name] = add(values)
    return found
