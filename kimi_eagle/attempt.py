"""One attempt at one stage: job, worker, shards as they come, outputs published, all recorded.

An attempt has a name of its own and works in a staging folder of that name. Only the coordinator
that started it publishes what it made, so an orphan cannot. Where the work is lost with the node
that did it, it is given out again, in a folder of another name: nothing that comes from the lost
one later is looked at.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import write_text
from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.books import Books
from kimi_eagle.errand import Errand, Take, came_to_its_end, used
from kimi_eagle.executors.local import LocalExecutor
from kimi_eagle.executors.protocol import Executor, TaskLost
from kimi_eagle.fan_out import FanOut, Part, together
from kimi_eagle.forecast import makes_states
from kimi_eagle.harvest import StateStore
from kimi_eagle.job import (
    EVENTS,
    JOB,
    OUT,
    Given,
    Job,
    Share,
    StageFailed,
    read_result,
)
from kimi_eagle.manifest.execution import Execution, Local
from kimi_eagle.orphans import Orphan
from kimi_eagle.outcome import Reporter, StageOutcome
from kimi_eagle.pins import Pinned, member_records
from kimi_eagle.placement import workers_of
from kimi_eagle.plan import StagePlan
from kimi_eagle.provenance import environment
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.schema import FILE
from kimi_eagle.snapshots import Saved, Snapshots, starts_anew
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import StageParams
from kimi_eagle.stages.train.spec import TrainParams

POLL_SECONDS = 0.05
# An attempt under way: it is resumed again and again, and returns how it came out.
Steps = Generator[None, None, StageOutcome]


@dataclass(frozen=True)
class StageInputs:
    """What one stage is given: what it pins from outside, and what earlier stages made."""

    params: StageParams
    verifier: Path
    pinned: Mapping[str, tuple[Pinned, ...]]
    upstream: Mapping[str, tuple[str, str]]
    """Role → (digest, name of the stage that made it)."""

    def records(self, stage: StagePlan) -> dict[str, list[ArtifactRecord | str]]:
        """The stage's inputs for the registry: pinned ones with their records."""
        return with_records(stage, self.pinned)

    def members(self) -> list[ArtifactRecord]:
        """The files of pinned folders, which the folders' records point to."""
        return [
            member
            for items in self.pinned.values()
            for item in items
            if item.record.state == "external"
            for member in member_records(item)
        ]


def with_records(
    stage: StagePlan, pinned: Mapping[str, tuple[Pinned, ...]]
) -> dict[str, list[ArtifactRecord | str]]:
    """A stage's inputs by role: digests, and in their place the records of what is pinned."""
    found: dict[str, list[ArtifactRecord | str]] = {
        role: list(digests) for role, digests in stage.inputs.items()
    }
    for role, items in pinned.items():
        found[role] = [item.record for item in items]
    return found


class Attempts:
    """Makes attempts under one root."""

    def __init__(
        self,
        root: Path,
        registry: Ledger,
        objects: Objects,
        digests: Digests,
        reporter: Reporter,
        states: StateStore | None = None,
        execution: Execution | None = None,
        executor: Executor | None = None,
    ):
        """Args:
        states: a store of hidden states other than the root's own.
        execution, executor: where stages run; on this machine when not given.
        """
        self._root = root
        self._states = states or StateStore(root, registry)
        self._registry = registry
        self._objects = objects
        self._digests = digests
        self._reporter = reporter
        self._books = Books(root, registry, reporter.note)
        self._snapshots = Snapshots(root, registry, objects, self._books)
        self._execution = execution or Local()
        self._executor = executor or LocalExecutor()
        self._errand = Errand(self._states, digests, reporter, self._execution, self._executor)

    def execute(
        self,
        run_id: str,
        stage: StagePlan,
        given: StageInputs,
        *,
        disposition: str = "executed",
    ) -> StageOutcome:
        """Run a stage to its end and record it as `disposition`, or as failed.

        Anything else that `disposition` says than `executed` is not found by key later on.
        """
        steps = self.steps(run_id, stage, given, disposition=disposition)
        try:
            while True:
                next(steps)
                time.sleep(POLL_SECONDS)
        except StopIteration as ended:
            return cast(StageOutcome, ended.value)
        finally:
            steps.close()

    def steps(
        self,
        run_id: str,
        stage: StagePlan,
        given: StageInputs,
        *,
        disposition: str = "executed",
        why_not: str | None = None,
        adopted: Mapping[Share | None, Orphan] | None = None,
    ) -> Steps:
        """As `execute`, beside others: resumed until it returns, ended when it is closed.

        Args:
            why_not: it is not started, and recorded as failed for that reason.
            adopted: the work that another coordinator gave out, to be followed instead: shares of
                the rows, or all of it.
        """
        with ExitStack() as recorded:
            return (
                yield from self._steps(
                    run_id, stage, given, disposition, recorded, why_not, adopted or {}
                )
            )

    def _steps(
        self,
        run_id: str,
        stage: StagePlan,
        given: StageInputs,
        disposition: str,
        recorded: ExitStack,
        why_not: str | None,
        orphans: Mapping[Share | None, Orphan],
    ) -> Steps:
        """Args: `recorded` ends when the outcome is in the registry."""
        key, document = str(stage.key), stage.document or {}
        attempt = f"{run_id}-{stage.name}-{secrets.token_hex(4)}"
        adopted = orphans.get(None)
        if adopted is not None:
            attempt = adopted.folder.name
        kept = self._root / run_id / "stages"
        kept.mkdir(exist_ok=True)
        log = kept / f"{stage.name}.log"
        started = time.monotonic()
        # What is made again to be compared is made from the start.
        training = _training(given) if disposition == "executed" else None
        resumed = self._snapshots.latest(document, training) if training else None
        if training is not None and resumed is None:
            before = self._registry.latest_of(stage.kind, stage.name)
            anew = starts_anew(before.document if before else None, document)
            if anew is not None:
                self._reporter.note(f"{stage.name}: {anew}")
        inputs = given.records(stage)
        resume = _resume_of(adopted) if adopted else resumed and resumed.record.digest
        if resume:
            inputs["resume"] = [resume]
        # What a coordinator that is gone began is gone on with under the same number.
        execution = self._registry.under_way(
            run_id, stage.name, key
        ) or self._registry.begin_execution(
            run_id,
            stage.name,
            stage.kind,
            key,
            document,
            inputs,
            given.members(),
            attempt,
            environment(),
        )
        self._books.execution(execution)
        self._reporter.stage_started(stage)
        origin = {
            "key": key,
            "document": document,
            "stage": stage.name,
            "run": run_id,
            "environment": environment(),
        }
        take: Take = _refuse
        if training is not None:
            take = self._snapshots.taker(execution, run_id, origin, training.retention)
        metrics: dict[str, Any] = {}
        resources: dict[str, Any] = {}
        outputs: dict[str, ArtifactRecord] = {}
        error: str | None = None
        parts: list[Part] | None = None
        lost = 0
        while True:
            name = f"{attempt}.{lost}" if lost else attempt
            with self._staging(name) as folder:
                try:
                    if why_not is not None:
                        write_text(log, f"not started: {why_not}\n")
                        raise StageFailed(why_not)
                    _unchanged(stage, given)
                    if adopted is not None:
                        running = adopted.found(self._executor)
                        at_log = Path(adopted.note.log)
                    else:
                        at_log = log
                        if parts is None:
                            parts = yield from self._parts(stage, given, attempt, log, orphans)
                        job = self._job(stage, given, folder, resumed, saves=training is not None)
                        job = replace(job, parts=[part.metrics for part in parts])
                        running = yield from self._errand.submitted(
                            stage, given.params, job, log, again=lost > 0
                        )
                    code = yield from self._errand.work(stage, running, folder, take)
                    result = read_result(folder)
                    metrics = dict(result["metrics"]) if result and "metrics" in result else {}
                    resources = together(used(folder), parts or ())
                    came_to_its_end(stage.name, code, result, at_log)
                    _unchanged(stage, given)
                    production = {**origin, "disposition": disposition, "metrics": metrics}
                    outputs = self._publish(stage, folder, production, recorded)
                    resources["bytes_written"] = sum(item.bytes for item in outputs.values())
                except TaskLost as problem:
                    lost += 1
                    if lost <= self._execution.retries:
                        self._reporter.note(
                            f"{stage.name}: {problem}; beginning it again "
                            f"({lost} of {self._execution.retries})"
                        )
                        if training is not None:
                            resumed = self._snapshots.latest(document, training)
                        adopted = None
                        continue
                    error = f"{problem}; that was attempt {lost}, and the last one"
                except (StageFailed, OSError) as problem:
                    error = str(problem)
                finally:  # also of a stage that was interrupted, and goes on in another run
                    with suppress(OSError):
                        shutil.copyfile(folder / EVENTS, kept / f"{stage.name}.events")
                    if adopted is not None and Path(adopted.note.log) != log:
                        with suppress(OSError):
                            shutil.copyfile(adopted.note.log, log)
            break
        seconds = round(time.monotonic() - started, 3)
        came_out = disposition if error is None else "failed"
        self._registry.end_execution(
            execution,
            came_out,
            seconds=seconds,
            outputs=outputs,
            metrics=metrics,
            resources=resources,
            error=error,
        )
        self._books.execution(execution)
        if training is not None and error is None:
            self._snapshots.let_go(run_id, document, training.retention, ended=True)
        return StageOutcome(
            stage.name,
            stage.kind,
            came_out,
            key,
            {role: record.digest for role, record in outputs.items()},
            metrics,
            seconds,
            error,
            log,
            resources,
        )

    def _parts(
        self,
        stage: StagePlan,
        given: StageInputs,
        attempt: str,
        log: Path,
        orphans: Mapping[Share | None, Orphan],
    ) -> Generator[None, None, list[Part]]:
        """Have the rows of a stage done by several workers, where it asks for them."""
        workers = workers_of(given.params, self._executor)
        if workers == 1:
            return []

        def job(folder: Path, share: Share) -> Job:
            return replace(self._job(stage, given, folder, None, saves=False), share=share)

        fan_out = FanOut(
            stage,
            given.params,
            attempt,
            log,
            self._errand,
            self._executor,
            self._reporter,
            self._execution.retries,
            self._staging,
            job,
            {share: orphan for share, orphan in orphans.items() if share is not None},
        )
        return (yield from fan_out.steps(workers))

    @contextmanager
    def _staging(self, attempt: str) -> Iterator[Path]:
        """A folder for one attempt, gone afterwards."""
        folder = self._root / STAGING / attempt
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(
        self, stage: StagePlan, folder: Path, production: dict[str, Any], recorded: ExitStack
    ) -> dict[str, ArtifactRecord]:
        kind = KINDS[stage.kind]
        staged = folder / OUT / kind.output
        try:
            record = self._objects.describe(staged, kind.output)
        except ValueError as error:
            raise StageFailed(str(error)) from None
        # What is published is held by no run until it is recorded: until then `gc` waits.
        recorded.enter_context(gate(self._root, shared=True))
        self._objects.publish(staged, record, production)
        self._digests.flush()
        return {kind.output: record}

    def _job(
        self,
        stage: StagePlan,
        given: StageInputs,
        folder: Path,
        resumed: Saved | None,
        *,
        saves: bool,
    ) -> Job:
        inputs = {
            role: tuple(
                Given(item.record.digest, str(item.path), item.record.label) for item in items
            )
            for role, items in given.pinned.items()
        }
        for role, (digest, source) in given.upstream.items():
            inputs[role] = (Given(digest, str(self._objects.path(digest)), source),)
        if resumed is not None:
            digest = resumed.record.digest
            inputs["resume"] = (Given(digest, str(self._objects.path(digest))),)
        index = self._states.root / FILE
        if self._executor.remote and (makes_states(stage.kind) or "states" in given.upstream):
            # A database in use is not to be read from another machine.
            index = folder / "index.sqlite"
            self._states.registry.copy_state_rows(index)
        return Job(
            stage=stage.name,
            kind=stage.kind,
            params=given.params.model_dump(mode="json"),
            inputs=inputs,
            verifier=str(given.verifier.absolute()),
            folder=str(folder),
            root=str(self._states.root),
            registry=str(index),
            saves=saves,
        )


def _resume_of(adopted: Orphan) -> str | None:
    """The snapshot that work which goes on began from."""
    try:
        given = Job.read(adopted.folder / JOB).inputs.get("resume", ())
    except (OSError, ValueError, TypeError):
        return None
    return next((item.digest for item in given), None)


def _training(given: StageInputs) -> TrainParams | None:
    """A stage that saves what it can go on from."""
    return given.params if isinstance(given.params, TrainParams) else None


def _refuse(_folder: Path, event: Mapping[str, Any]) -> None:
    raise StageFailed(f"snapshot {event['name']} was saved, and nobody asked for it")


def _unchanged(stage: StagePlan, given: StageInputs) -> None:
    """Raises: StageFailed when an input from outside is not as it was pinned any more."""
    for items in given.pinned.values():
        for item in items:
            changed = item.changed()
            if changed is not None:
                raise StageFailed(
                    f"{changed} changed while {stage.name} was under way: what was made of it "
                    "is not kept; submit again"
                )
