"""The loop of a run: plan, execute what must run, publish, record. The registry's sole writer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.artifacts.locks import Lock, gate, held
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.attempt import Attempts, StageInputs, with_records
from kimi_eagle.books import STAGES, Books
from kimi_eagle.eviction import ALIVE as ALIVE
from kimi_eagle.eviction import release_states
from kimi_eagle.forecast import Forecast, Forecaster, makes_states
from kimi_eagle.harvest import StateStore, take_left
from kimi_eagle.history import History
from kimi_eagle.job import EVENTS, SHARDS
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.outcome import Reporter, RunOutcome, StageOutcome, outcome_document
from kimi_eagle.pins import Pins, pin
from kimi_eagle.plan import REUSE, RUN, StagePlan, plan, versions_of
from kimi_eagle.provenance import environment
from kimi_eagle.records import ArtifactRecord, ExecutionRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger, Reuse
from kimi_eagle.registry.schema import RegistryError
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.terminal import human_size

# Folders directly under the root that are not runs.
LOCKS = ".locks"


class Interrupted(Exception):
    """The user asked the run to stop."""


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
        self._attempts = Attempts(self.root, self.registry, self.objects, self.digests, reporter)
        if self.registry.journal_mode != "WAL":
            reporter.note(
                f"{self.root} is on a network file system: the registry does without a "
                "write-ahead log there"
            )

    def close(self) -> None:
        self.digests.flush()
        self.registry.close()

    def pin(self, loaded: LoadedManifest) -> Pins:
        """See `pins.pin`. Raises: ManifestError."""
        return pin(loaded, self.digests, self._stored)

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
        )

    def forecast(
        self, loaded: LoadedManifest, pins: Pins, stages: Sequence[StagePlan]
    ) -> dict[str, Forecast]:
        """What stages that are not reused would write to the state store, as far as is known."""
        found = {}
        for stage in stages:
            if not makes_states(stage.kind) or stage.action == REUSE:
                continue
            params = loaded.manifest.stages[stage.name]
            rows = dict(loaded.manifest.upstream(stage.name))["rows"]
            forecast = self.forecaster.of(
                params,
                pins.verifier.facts,
                stage.inputs["verifier"][0],
                next(iter(stage.inputs.get("rows", ())), None),
                {**pins.stages[rows], **pins.stages[stage.name]},
            )
            if forecast is not None:
                found[stage.name] = forecast
        return found

    def named(self, pins: Pins, digest: str) -> ArtifactRecord | None:
        """What is known of an artifact: from outside, as it is now, or as it once was."""
        return pins.record(digest) or self.registry.artifact(digest)

    def submit(self, loaded: LoadedManifest) -> RunOutcome:
        """Run a manifest to its end.

        Raises:
            ManifestError: an input is not there; nothing was started.
        """
        pins = self.pin(loaded)
        self.clear_dead()
        run_id = secrets.token_hex(6)
        folder = self.root / run_id
        with self.recording(run_id, loaded):
            outcome = RunOutcome(run_id, "running")
            try:
                with interruptible():
                    self._loop(loaded, pins, outcome)
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
                write_text(folder / "outcome.json", ended + "\n")
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

    def _loop(self, loaded: LoadedManifest, pins: Pins, outcome: RunOutcome) -> None:
        settled: dict[str, ExecutionRecord] = {}
        released: set[str] = set()
        while True:
            stages = self._settle(loaded, pins, settled, outcome)
            self._release(loaded, settled, released, outcome.run_id)
            waiting = [stage for stage in stages if stage.action == RUN]
            if not waiting:
                return
            refused = self._refused(loaded, pins, waiting, settled)
            stage, why_not = refused or (waiting[0], None)
            with self._sole(stage):
                made = self.registry.made_by_key(str(stage.key))
                if made is not None and self.history.trouble(made) is None:
                    continue  # another run made it meanwhile: the next plan reuses it
                if makes_states(stage.kind):
                    self.history.check_shards()  # it takes every row that is listed for whole
                result = self._attempts.execute(
                    outcome.run_id,
                    stage,
                    self._given(loaded, stage, pins, settled),
                    why_not=why_not,
                )
            outcome.stages.append(result)
            self._reporter.stage_ended(result)
            if result.disposition != "executed":
                return
            fresh = self.registry.made_by_key(str(stage.key))
            assert fresh is not None, "an executed stage is in the registry"
            settled[stage.name] = fresh

    def _release(
        self,
        loaded: LoadedManifest,
        settled: Mapping[str, ExecutionRecord],
        released: set[str],
        run_id: str,
    ) -> None:
        """Evict hidden states that are not to be kept, once every stage that takes them is done."""
        for name, takers in short_lived(loaded.manifest).items():
            if name in released or not takers or not {name, *takers} <= settled.keys():
                continue
            released.add(name)
            (digest,) = settled[name].outputs.values()
            found = release_states(self.root, self.objects, Keeper(self.registry), digest, run_id)
            if found.why_not:
                if self.objects.path(digest).is_dir():
                    self._reporter.note(f"{name}: its hidden states are kept: {found.why_not}")
                continue
            self._reporter.note(
                f"{name}: its hidden states were evicted (keep: none): {human_size(found.bytes)} "
                "freed; they are made again when something needs them"
            )

    def _refused(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        waiting: Sequence[StagePlan],
        settled: Mapping[str, ExecutionRecord],
    ) -> tuple[StagePlan, str] | None:
        """The first stage whose hidden states do not fit where they are kept, and why: it fails
        before hours go into the stages before it. An estimate refuses nothing."""
        for name, forecast in self.forecast(loaded, pins, waiting).items():
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

    @contextmanager
    def _sole(self, stage: StagePlan) -> Iterator[None]:
        """Hold the stage's key alone, waiting for a run that holds it."""
        lock = Lock(self.root / LOCKS / f"{stage.key}.lock")
        try:
            if not lock.acquire(wait=False):
                self._reporter.note(f"{stage.name}: another run is making it; waiting")
                while not lock.acquire(wait=False):
                    time.sleep(0.2)
            yield
        finally:
            lock.release()

    def clear_dead(self) -> None:
        """Give runs whose coordinator died their end, and clear what they left in staging."""
        for run_id in self.registry.running_runs():
            if not held(self.root / run_id / ALIVE):
                self.registry.abandon_running(run_id, "interrupted")
                self.registry.end_run(run_id, "interrupted")
                self.books.close(run_id)
        states = StateStore(self.root, self.registry)
        # What holds the gate alone works in the staging folder too, and is no run.
        with gate(self.root, shared=True):
            staging = self.root / STAGING
            for folder in staging.iterdir() if staging.is_dir() else ():
                run_id = folder.name.split("-")[0]
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn a request to end (SIGTERM) into the same orderly stop as ctrl-c."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reused_metrics(made: ExecutionRecord) -> dict[str, Any]:
    """Metrics of a reused stage: what is true of its outputs, with nothing claimed as work done."""
    metrics = dict(made.metrics)
    counted = ("rows_extracted", "tokens_extracted", "rows_imported", "tokens_imported")
    for name in (*counted, "answers_generated"):
        if name in metrics:
            metrics[name] = 0
    return metrics


def short_lived(manifest: Manifest) -> dict[str, list[str]]:
    """Stages whose hidden states last only as long as a run needs them, and what takes these."""
    return {
        name: [
            taker
            for taker in manifest.stages
            if name in {source for _, source in manifest.upstream(taker)}
        ]
        for name, params in manifest.stages.items()
        if makes_states(params.kind) and getattr(params, "keep", None) == "none"
    }
