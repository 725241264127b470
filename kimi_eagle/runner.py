"""The loop of a run: plan, execute what must run, publish, record. The registry's sole writer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.artifacts.locks import Lock, gate, held
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.attempt import POLL_SECONDS, Attempts, StageInputs, with_records
from kimi_eagle.beside import Beside
from kimi_eagle.books import STAGES, Books
from kimi_eagle.eviction import ALIVE as ALIVE
from kimi_eagle.eviction import GOING, finish_evictions, owner_of
from kimi_eagle.exchange import Exchange
from kimi_eagle.executors.local import LocalExecutor
from kimi_eagle.executors.protocol import Executor
from kimi_eagle.forecast import Forecaster, makes_states
from kimi_eagle.harvest import StateStore, take_left
from kimi_eagle.history import History
from kimi_eagle.interrupts import Interrupted, interruptible
from kimi_eagle.job import EVENTS, SHARDS, Share
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.orphans import Orphan, orphans
from kimi_eagle.outcome import Reporter, RunOutcome, StageOutcome, outcome_document
from kimi_eagle.pins import Pins, pin
from kimi_eagle.placement import executor_of, misfits, needs_of
from kimi_eagle.plan import REUSE, RUN, StagePlan, plan, versions_of
from kimi_eagle.provenance import environment
from kimi_eagle.records import ArtifactRecord, ExecutionRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger, Reuse
from kimi_eagle.registry.schema import RegistryError
from kimi_eagle.remote_store import RemoteError, RemoteStore
from kimi_eagle.short_lived import ShortLived
from kimi_eagle.stages.catalog import KINDS

# Folders directly under the root that are not runs.
LOCKS = ".locks"


# A stage that a run is done with, and the execution that made its outputs.
Done = tuple[StageOutcome, ExecutionRecord]


class Runner:
    """Runs manifests under one root."""

    def __init__(self, root: Path, reporter: Reporter):
        """Raises: RegistryError when the registry under `root` cannot be used."""
        self.root = root.absolute()
        self.registry = Ledger(self.root)
        self.digests = Digests(self.registry)
        self.objects = Objects(self.root, self.digests)
        self.history = History(self.registry, self.objects, self.root, self.digests)
        self._reporter = reporter
        self.books = Books(self.root, self.registry, reporter.note)
        self.forecaster = Forecaster(self.root, self.registry, self.objects)
        self._executor: Executor = LocalExecutor()
        self._attempts: Attempts | None = None
        self._elsewhere: Exchange | None = None
        self._fetches_states = False
        if self.registry.journal_mode != "WAL":
            reporter.note(
                f"{self.root} is on a network file system: the registry does without a "
                "write-ahead log there"
            )

    def close(self) -> None:
        self.digests.flush()
        self.registry.close()

    def pin(self, loaded: LoadedManifest, *, may_lack: bool = False) -> Pins:
        """See `pins.pin`. Raises: ManifestError."""
        return pin(loaded, self.digests, self._stored, may_lack=may_lack)

    def _stored(self, prefix: str) -> list[tuple[ArtifactRecord, Path, str | None]]:
        return [
            (record, self.objects.path(record.digest), self.history.artifact_trouble(record))
            for record in self.registry.artifacts_starting(prefix)
            if record.state != "external"
        ]

    def plan(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        settled: Mapping[str, ExecutionRecord] | None = None,
    ) -> list[StagePlan]:
        externals = {name: pins.digests(name) for name in loaded.manifest.stages}
        return plan(
            loaded.manifest,
            pins.verifier.facts,
            externals,
            self.history,
            settled,
            versions_of(environment()),
            partial(self.named, pins),
            pins.absent,
        )

    def named(self, pins: Pins, digest: str) -> ArtifactRecord | None:
        """What is known of an artifact: from outside, as it is now, or as it once was."""
        return pins.record(digest) or self.registry.artifact(digest)

    def submit(self, loaded: LoadedManifest) -> RunOutcome:
        """Run a manifest to its end.

        Raises:
            ManifestError: an input is not there, or a stage can never run where it is to; nothing
                was started.
            ExecutorError: where stages are to run cannot be reached; nothing was started.
        """
        pins = self.pin(loaded)
        self.clear_dead()
        with self._placed(loaded, pins):
            run_id = secrets.token_hex(6)
            with self.recording(run_id, loaded):
                return self._coordinate(loaded, pins, RunOutcome(run_id, "running"), {})

    def resume(self, run_id: str, loaded: LoadedManifest, done: Sequence[Done]) -> RunOutcome:
        """Take a run over whose coordinator died, and run it to its end: what goes on elsewhere is
        followed, what it finished is taken as it is.

        Raises: as `submit`; LookupError: somebody runs it, or it has ended.
        """
        pins = self.pin(loaded)
        folder = self.root / run_id
        alive = Lock(folder / ALIVE)
        try:
            if not alive.acquire(wait=False) or run_id not in self.registry.running_runs():
                raise LookupError(f"run {run_id} is not lost any more")
            with self._placed(loaded, pins):
                self.registry.take_over(run_id, socket.gethostname(), os.getpid())
                self.books.run(run_id)
                self._reporter.run_started(run_id, folder)
                outcome = RunOutcome(run_id, "running", [stage for stage, _ in done])
                settled = {
                    stage.name: made for stage, made in done if self.history.trouble(made) is None
                }
                return self._coordinate(loaded, pins, outcome, settled)
        finally:
            alive.release()

    @contextmanager
    def _placed(self, loaded: LoadedManifest, pins: Pins) -> Iterator[None]:
        """With the executor that a manifest chose. Raises: ManifestError, ExecutorError."""
        execution = loaded.manifest.executor
        self._executor = executor_of(execution)
        try:
            wrong = misfits(loaded, self._executor, list(loaded.manifest.stages))
            if wrong:
                again = {stage.name for stage in self.plan(loaded, pins) if stage.action != REUSE}
                for name in wrong.keys() & again:
                    raise loaded.error(("stages", name, "resources"), wrong[name])
            self._attempts = Attempts(
                self.root,
                self.registry,
                self.objects,
                self.digests,
                self._reporter,
                execution=execution,
                executor=self._executor,
            )
            self._elsewhere = self._exchange(loaded.manifest.store.remote)
            self._fetches_states = loaded.manifest.store.fetch_states
            yield
        finally:
            self._executor.close()

    def _exchange(self, url: str | None) -> Exchange | None:
        """With a store elsewhere. Raises: RemoteError: nothing here can speak to it."""
        if url is None:
            return None
        return Exchange(
            self.root,
            self.registry,
            self.objects,
            self.digests,
            RemoteStore(url),
            lambda _: None,
            self._reporter.note,
        )

    def _coordinate(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        outcome: RunOutcome,
        settled: dict[str, ExecutionRecord],
    ) -> RunOutcome:
        """Args: `settled`: what the run has made or taken already."""
        run_id = outcome.run_id
        try:
            with interruptible():
                self._loop(loaded, pins, outcome, settled)
            outcome.status = "done"
            if any(stage.disposition == "failed" for stage in outcome.stages):
                outcome.status = "failed"
        except (Interrupted, KeyboardInterrupt):
            outcome.status = "interrupted"
        except (OSError, RegistryError) as error:
            outcome.status = "failed"
            self._reporter.note(f"the run ends here: {error}")
        except BaseException:
            self.end(run_id, "failed")
            raise
        self.end(run_id, outcome.status)
        ended = json.dumps(outcome_document(outcome), ensure_ascii=False)
        try:
            write_text(self.root / run_id / "outcome.json", ended + "\n")
        except OSError as error:  # the registry has it all
            self._reporter.note(str(error))
        return outcome

    def end(self, run_id: str, status: str) -> None:
        """Record how a run ended."""
        unfinished = "interrupted" if status == "interrupted" else "failed"
        self.registry.abandon_running(run_id, unfinished)
        self.registry.end_run(run_id, status)
        self.books.close(run_id)

    @contextmanager
    def recording(
        self, run_id: str, loaded: LoadedManifest, kind: str = "submit"
    ) -> Iterator[None]:
        """Record that a run of a kind (`submit`, `reproduce`) began, and hold its sign of life."""
        folder = self.root / run_id
        folder.mkdir(parents=True)
        write_text(folder / "manifest.yaml", loaded.text)
        written_out = json.dumps(loaded.resolved, ensure_ascii=False)
        write_text(folder / "resolved.json", written_out + "\n")
        write_json(folder / "environment.json", environment())
        with Lock(folder / ALIVE):
            with gate(self.root, shared=True):
                # Opened anew: another may have taken its place (`registry rebuild`, `restore`)
                # until a while ago. From here on, none does.
                self.registry.close()
                self.registry.begin_run(
                    run_id,
                    kind=kind,
                    name=loaded.manifest.name,
                    manifest_digest=loaded.digest,
                    manifest_path=str(loaded.path.absolute()),
                    manifest_text=loaded.text,
                    resolved=written_out,
                    overrides=json.dumps(loaded.overrides),
                    environment=json.dumps(environment()),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                )
            self.books.run(run_id)
            self._reporter.run_started(run_id, folder)
            yield

    def _loop(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        outcome: RunOutcome,
        settled: dict[str, ExecutionRecord],
    ) -> None:
        short_lived = ShortLived(
            self.root, self.objects, self.registry, self._reporter.note, loaded.manifest
        )
        failed = False
        with Beside(self._executor) as beside:
            while True:
                stages = self._settle(loaded, pins, settled, outcome)
                short_lived.release(settled, outcome.run_id)
                waiting = [stage for stage in stages if stage.action == RUN] if not failed else []
                refused = self._refused(loaded, pins, waiting, settled)
                for stage in [refused[0]] if refused else waiting:
                    needs = needs_of(loaded.manifest.stages[stage.name].resources)
                    if beside.room(stage, needs):
                        given = self._given(loaded, stage, pins, settled)
                        why_not = refused[1] if refused else None
                        steps = self._steps(outcome.run_id, stage, given, why_not)
                        beside.begin(stage, needs, steps)
                if not beside:
                    return
                while not (ended := beside.step()):
                    time.sleep(POLL_SECONDS)
                for stage, result in ended:
                    if result is None:
                        continue  # another run made it meanwhile: the next plan reuses it
                    outcome.stages.append(result)
                    self._reporter.stage_ended(result)
                    if result.disposition != "executed":
                        failed = True
                        continue
                    fresh = self.registry.made_by_key(str(stage.key))
                    assert fresh is not None, "an executed stage is in the registry"
                    settled[stage.name] = fresh

    def _steps(
        self, run_id: str, stage: StagePlan, given: StageInputs, why_not: str | None
    ) -> Generator[None, None, StageOutcome | None]:
        """Make a stage, alone in the world; returns None when another run has made it by then."""
        lock = Lock(self.root / LOCKS / f"{stage.key}.lock")
        try:
            if not lock.acquire(wait=False):
                self._reporter.note(f"{stage.name}: another run is making it; waiting")
                while not lock.acquire(wait=False):
                    yield
            made = self.registry.made_by_key(str(stage.key))
            if made is not None and self.history.trouble(made) is None:
                return None
            if self._fetched(stage):
                return None
            if makes_states(stage.kind):
                self.history.check_shards()  # it takes every row that is listed for whole
            adopted = self._adopted(stage, run_id) if self._executor.remote else None
            assert self._attempts is not None, "it is placed before anything runs"
            return (
                yield from self._attempts.steps(
                    run_id, stage, given, why_not=why_not, adopted=adopted
                )
            )
        finally:
            lock.release()

    def _fetched(self, stage: StagePlan) -> bool:
        """Whether a stage was made by somebody else, and taken in from where they put it."""
        try:
            found = self._elsewhere is not None and self._elsewhere.fetch_made(
                str(stage.key), states=self._fetches_states
            )
        except RemoteError as error:
            self._reporter.note(f"{stage.name}: made here, since {error}")
            return False
        if found:
            self._reporter.note(f"{stage.name}: taken from the store elsewhere")
        return found

    def _adopted(self, stage: StagePlan, run_id: str) -> dict[Share | None, Orphan]:
        """Work on a stage that goes on though its coordinator died, or came to its end since."""
        found = {
            orphan.note.share: orphan
            for orphan in orphans(self.root, run_id)
            if orphan.note.key == stage.key and orphan.note.execution["kind"] == self._executor.name
        }
        for orphan in list(found.values())[:1]:
            self._reporter.note(f"{stage.name}: going on with work of run {orphan.run_id}")
        return found

    def _refused(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        waiting: Sequence[StagePlan],
        settled: Mapping[str, ExecutionRecord],
    ) -> tuple[StagePlan, str] | None:
        """The first stage whose hidden states do not fit where they are kept, and why: it fails
        before hours go into the stages before it. An estimate refuses nothing."""
        for name, forecast in self.forecaster.all(loaded, pins, waiting).items():
            given = {source for _, source in loaded.manifest.upstream(name)}
            if forecast.basis or not given <= settled.keys():
                continue
            trouble = self.forecaster.trouble(forecast, loaded.manifest.store.quota_bytes)
            if trouble is not None:
                return next(stage for stage in waiting if stage.name == name), trouble
        return None

    def _settle(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        settled: dict[str, ExecutionRecord],
        outcome: RunOutcome,
    ) -> list[StagePlan]:
        """Plan, and take what is there already; what it finds in the store stays there until the
        run's use of it is recorded."""
        with gate(self.root, shared=True):
            stages = self.plan(loaded, pins, settled)
            self.digests.flush()
            reused: list[tuple[StagePlan, ExecutionRecord]] = []
            for stage in stages:
                if stage.name in settled or stage.made is None or stage.action == RUN:
                    continue
                if any(source not in settled for _, source in loaded.manifest.upstream(stage.name)):
                    continue  # an input is made again first, and may come out another
                settled[stage.name] = stage.made
                reused.append((stage, stage.made))
            self._reuse(outcome, pins, reused)
        return stages

    def _reuse(
        self, outcome: RunOutcome, pins: Pins, reused: Sequence[tuple[StagePlan, ExecutionRecord]]
    ) -> None:
        """Take stages' outputs from earlier runs: all of them recorded at once."""
        self.registry.reuse_executions(
            outcome.run_id,
            [
                Reuse(stage.name, made, with_records(stage, pins.stages[stage.name]))
                for stage, made in reused
            ],
            pins.members(stage.name for stage, _ in reused),
        )
        for stage, made in reused:
            outcome.stages.append(
                StageOutcome(
                    stage.name,
                    stage.kind,
                    "reused",
                    str(stage.key),
                    made.outputs,
                    _reused_metrics(made),
                    0.0,
                )
            )
            self._reporter.stage_reused(stage, made)

    def _given(
        self,
        loaded: LoadedManifest,
        stage: StagePlan,
        pins: Pins,
        settled: Mapping[str, ExecutionRecord],
    ) -> StageInputs:
        upstream = {}
        for role, source in loaded.manifest.upstream(stage.name):
            made = settled[source]
            upstream[role] = (made.outputs[KINDS[made.kind].output], source)
        return StageInputs(
            loaded.manifest.stages[stage.name],
            pins.verifier.path,
            pins.stages[stage.name],
            upstream,
        )

    def clear_dead(self) -> None:
        """Give runs whose coordinator died their end, and clear what they left in staging; but
        what they gave out to a cluster goes on, and is for `attach` or `cancel`."""
        going = {orphan.folder: orphan.run_id for orphan in orphans(self.root)}
        for run_id in self.registry.running_runs():
            if held(self.root / run_id / ALIVE):
                continue
            if run_id in going.values():
                self._reporter.note(
                    f"run {run_id} lost its coordinator, and its work goes on: `kimi-eagle attach "
                    f"{run_id}` takes it over, `kimi-eagle cancel {run_id}` ends it"
                )
                continue
            self.registry.abandon_running(run_id, "interrupted")
            self.registry.end_run(run_id, "interrupted")
            self.books.close(run_id)
        finish_evictions(self.objects, Keeper(self.registry))
        states = StateStore(self.root, self.registry)
        # What holds the gate alone works in the staging folder too, and is no run.
        with gate(self.root, shared=True):
            staging = self.root / STAGING
            for folder in staging.iterdir() if staging.is_dir() else ():
                run_id = owner_of(folder)
                if folder in going or (folder / GOING).exists():
                    continue
                if not held(self.root / run_id / ALIVE):
                    self._keep_events(run_id, folder)
                    with suppress(OSError):
                        take_left(states, self.digests, folder / SHARDS)
                    shutil.rmtree(folder, ignore_errors=True)

    def _keep_events(self, run_id: str, folder: Path) -> None:
        """What a stage told before its coordinator died is kept with its run: the curves of a
        training that goes on in another."""
        stage = folder.name.removeprefix(f"{run_id}-").rpartition("-")[0]
        target = self.root / run_id / STAGES / f"{stage}.events"
        if stage and (folder / EVENTS).exists() and target.parent.is_dir() and not target.exists():
            with suppress(OSError):
                shutil.copyfile(folder / EVENTS, target)


def _reused_metrics(made: ExecutionRecord) -> dict[str, Any]:
    """Metrics of a reused stage: what is true of its outputs, with nothing claimed as work done."""
    metrics = dict(made.metrics)
    counted = ("rows_extracted", "tokens_extracted", "rows_imported", "tokens_imported")
    for name in (*counted, "answers_generated"):
        if name in metrics:
            metrics[name] = 0
    return metrics
