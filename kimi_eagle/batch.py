"""What is asked of runs while they run, or of what they left: output, progress, an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.coordinator import RUNNING, as_it_is, cancel
from kimi_eagle.follow import RunFollower, follow_text, stage_log, stages_named
from kimi_eagle.outcome import Reporter, RunOutcome
from kimi_eagle.progress import SUBMIT_LOG
from kimi_eagle.records import ExecutionRecord, RunRecord
from kimi_eagle.registry.search import Search
from kimi_eagle.registry.store import Registry


@dataclass(frozen=True)
class StageLog:
    """A stage's output: where it is, and whether more can come."""

    path: Path
    over: Callable[[], bool]
    """Whether the stage has ended, as of now."""
    made_by: str | None
    """The earlier run whose stage it was, where this run took its outputs."""

    def text(self, *, follow: bool) -> Iterator[str]:
        """What it holds; and when asked to follow, what it comes to hold until the stage ends."""
        return follow_text(self.path, self.over if follow else lambda: True)


class Batch:
    """Runs under one root, seen from outside."""

    def __init__(self, root: Path):
        """Raises: RegistryError."""
        self._root = root
        self._registry = Registry(root, create=False)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self._registry.close()

    def run(self, prefix: str) -> RunRecord:
        """A run by the start of its id, or `latest`. Raises: UnknownDigest, AmbiguousDigest."""
        return self._as_it_is(Search(self._registry).run(prefix))

    def submit_log(self, run: RunRecord) -> Path | None:
        """What a detached coordinator printed; None for one that had a terminal or a pipe."""
        path = self._root / run.id / SUBMIT_LOG
        return path if path.exists() else None

    def stage_log(self, run: RunRecord, stage: str) -> StageLog:
        """Raises: LookupError when the run has no such stage, or ended without it."""
        names = stages_named(self._registry, run.id)
        if stage not in names:
            raise LookupError(
                f"run {run.id} has no stage {stage!r}; its stages are {', '.join(names)}"
            )
        found = self._execution(run, stage)
        if found is None and run.status != RUNNING:
            raise LookupError(f"{stage} never began: run {run.id} is {run.status}")
        if found is not None and found.reused_from is not None:
            made = self._registry.execution(found.reused_from)
            return StageLog(
                stage_log(self._root, made.run_id, made.stage), lambda: True, made.run_id
            )
        return StageLog(stage_log(self._root, run.id, stage), lambda: self._over(run, stage), None)

    def over(self, run: RunRecord) -> bool:
        """Whether a run has ended, as of now."""
        return self._as_it_is(self._registry.run(run.id) or run).status != RUNNING

    def tell(self, run: RunRecord, reporter: Reporter, *, follow: bool) -> RunOutcome:
        """Tell a reporter how a run went, and when asked to follow, how it goes until its end."""
        follower = RunFollower(self._root, self._registry, run, reporter)
        return follower.outcome(follower.watch() if follow else follower.step())

    def cancel(self, run: RunRecord, seconds: float, tell: Callable[[str], None]) -> RunRecord:
        """Raises: CannotCancel, see `coordinator.cancel`."""
        return cancel(self._root, self._registry, run, seconds, tell)

    def _as_it_is(self, run: RunRecord) -> RunRecord:
        return as_it_is(self._root, run, self._registry.run)

    def _execution(self, run: RunRecord, stage: str) -> ExecutionRecord | None:
        stages = self._registry.stages_of(run.id)
        return next((item for item in reversed(stages) if item.stage == stage), None)

    def _over(self, run: RunRecord, stage: str) -> bool:
        if self.over(run):
            return True
        found = self._execution(run, stage)
        return found is not None and found.disposition != RUNNING
