"""The loop of a run: plan, execute what must run, publish, record. The registry's sole writer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import sync_folder, write_json, write_text
from kimi_eagle.artifacts.locks import Lock, held
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.executors.local import LocalExecutor, LocalJob
from kimi_eagle.history import History
from kimi_eagle.job import (
    EVENTS,
    OUT,
    SHARDS,
    EventReader,
    Given,
    Job,
    StageFailed,
    read_result,
)
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.manifest.model import resolved
from kimi_eagle.outcome import Reporter, RunOutcome, StageOutcome, outcome_document
from kimi_eagle.pins import Pins, member_records, pin
from kimi_eagle.plan import RUN, StagePlan, plan, versions_of
from kimi_eagle.provenance import environment
from kimi_eagle.records import ArtifactRecord, ExecutionRecord, ShardRecord
from kimi_eagle.registry.schema import FILE, RegistryError
from kimi_eagle.registry.store import Registry
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.states.layout import shard_path

# Folders directly under the root that are not runs.
ALIVE = ".alive"
LOCKS = ".locks"
_POLL_SECONDS = 0.05
_LOG_LINES = 40


class Interrupted(Exception):
    """The user asked the run to stop."""


class Runner:
    """Runs manifests under one root."""

    def __init__(self, root: Path, reporter: Reporter):
        """Raises: RegistryError when the registry under `root` cannot be used."""
        self.root = root.absolute()
        self.registry = Registry(self.root)
        self.digests = Digests(self.registry)
        self.objects = Objects(self.root, self.digests)
        self.history = History(self.registry, self.objects, self.root, self.digests)
        self._reporter = reporter
        self._executor = LocalExecutor()
        if self.registry.journal_mode != "WAL":
            reporter.note(
                f"{self.root} is on a network file system: the registry does without a "
                "write-ahead log there"
            )

    def close(self) -> None:
        self.digests.flush()
        self.registry.close()

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
        )

    def submit(self, loaded: LoadedManifest) -> RunOutcome:
        """Run a manifest to its end.

        Raises:
            ManifestError: an input is not there; nothing was started.
        """
        pins = pin(loaded, self.digests)
        self._clear_dead()
        run_id = secrets.token_hex(6)
        folder = self.root / run_id
        with self._run(run_id, folder, loaded):
            outcome = RunOutcome(run_id, "running")
            try:
                with _interruptible():
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
                self._end(run_id, "failed")
                raise
            self._end(run_id, outcome.status)
            write_json(folder / "outcome.json", outcome_document(outcome))
        return outcome

    def _end(self, run_id: str, status: str) -> None:
        unfinished = "interrupted" if status == "interrupted" else "failed"
        self.registry.abandon_running(run_id, unfinished)
        self.registry.end_run(run_id, status)

    @contextmanager
    def _run(self, run_id: str, folder: Path, loaded: LoadedManifest) -> Iterator[None]:
        folder.mkdir(parents=True)
        write_text(folder / "manifest.yaml", loaded.text)
        write_json(folder / "resolved.json", resolved(loaded.manifest))
        write_json(folder / "environment.json", environment())
        with Lock(folder / ALIVE):
            self.registry.begin_run(
                run_id,
                name=loaded.manifest.name,
                manifest_digest=loaded.digest,
                manifest_path=str(loaded.path.absolute()),
                manifest_text=loaded.text,
                resolved=json.dumps(resolved(loaded.manifest)),
                overrides=json.dumps(loaded.overrides),
                environment=json.dumps(environment()),
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self._reporter.run_started(run_id, folder)
            yield

    def _loop(self, loaded: LoadedManifest, pins: Pins, outcome: RunOutcome) -> None:
        settled: dict[str, ExecutionRecord] = {}
        while True:
            stages = self.plan(loaded, pins, settled)
            self.digests.flush()
            for stage in stages:
                if stage.name in settled or stage.made is None or stage.action == RUN:
                    continue
                if any(source not in settled for _, source in loaded.manifest.upstream(stage.name)):
                    continue  # an input is made again first, and may come out another
                settled[stage.name] = stage.made
                self._reuse(outcome, stage, stage.made, pins)
            waiting = [stage for stage in stages if stage.action == RUN]
            if not waiting:
                return
            stage = waiting[0]
            with self._sole(stage):
                made = self.registry.made_by_key(str(stage.key))
                if made is not None and self.history.trouble(made) is None:
                    continue  # another run made it meanwhile: the next plan reuses it
                result = self._execute(outcome.run_id, loaded, stage, pins, settled)
            outcome.stages.append(result)
            self._reporter.stage_ended(result)
            if result.disposition != "executed":
                return
            fresh = self.registry.made_by_key(str(stage.key))
            assert fresh is not None, "an executed stage is in the registry"
            settled[stage.name] = fresh

    def _reuse(
        self, outcome: RunOutcome, stage: StagePlan, made: ExecutionRecord, pins: Pins
    ) -> None:
        self.registry.reuse_execution(
            outcome.run_id, stage.name, made, self._inputs(stage, pins), _members(stage, pins)
        )
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

    def _inputs(self, stage: StagePlan, pins: Pins) -> dict[str, list[ArtifactRecord | str]]:
        """A stage's inputs for the registry: pinned ones with their records."""
        found: dict[str, list[ArtifactRecord | str]] = {
            role: list(digests) for role, digests in stage.inputs.items()
        }
        for role, items in pins.stages[stage.name].items():
            found[role] = [item.record for item in items]
        return found

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

    def _execute(
        self,
        run_id: str,
        loaded: LoadedManifest,
        stage: StagePlan,
        pins: Pins,
        settled: Mapping[str, ExecutionRecord],
    ) -> StageOutcome:
        key, document = str(stage.key), stage.document or {}
        attempt = f"{run_id}-{stage.name}-{secrets.token_hex(4)}"
        kept = self.root / run_id / "stages"
        kept.mkdir(exist_ok=True)
        log = kept / f"{stage.name}.log"
        started = time.monotonic()
        execution = self.registry.begin_execution(
            run_id,
            stage.name,
            stage.kind,
            key,
            document,
            self._inputs(stage, pins),
            _members(stage, pins),
            attempt,
            environment(),
        )
        self._reporter.stage_started(stage)
        metrics: dict[str, Any] = {}
        outputs: dict[str, ArtifactRecord] = {}
        with self._staging(attempt) as folder:
            try:
                job = self._job(loaded, stage, pins, settled, folder)
                self._unchanged(stage, pins)
                code = self._work(stage, job, log)
                result = read_result(folder)
                metrics = dict(result["metrics"]) if result and "metrics" in result else {}
                self._came_to_its_end(stage, code, result, log)
                self._unchanged(stage, pins)
                production = {
                    "key": key,
                    "document": document,
                    "stage": stage.name,
                    "run": run_id,
                    "metrics": metrics,
                    "environment": environment(),
                }
                outputs = self._publish(stage, folder, production)
                error = None
            except (StageFailed, OSError) as problem:
                error = str(problem)
            with suppress(OSError):
                shutil.copyfile(folder / EVENTS, kept / f"{stage.name}.events")
        seconds = round(time.monotonic() - started, 3)
        disposition = "executed" if error is None else "failed"
        write_json(
            kept / f"{stage.name}.json",
            {
                "stage": stage.name,
                "kind": stage.kind,
                "key": key,
                "document": document,
                "disposition": disposition,
                "seconds": seconds,
                "metrics": metrics,
                "error": error,
                "outputs": {role: record.digest for role, record in outputs.items()},
            },
        )
        self.registry.end_execution(
            execution, disposition, seconds=seconds, outputs=outputs, metrics=metrics, error=error
        )
        return StageOutcome(
            stage.name,
            stage.kind,
            disposition,
            key,
            {role: record.digest for role, record in outputs.items()},
            metrics,
            seconds,
            error,
            log,
        )

    @contextmanager
    def _staging(self, attempt: str) -> Iterator[Path]:
        """A folder for one attempt, gone afterwards."""
        folder = self.root / STAGING / attempt
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _work(self, stage: StagePlan, job: Job, log: Path) -> int:
        """Run the job's worker to its end; whatever stops us, stops it."""
        running = self._executor.submit(["-m", "kimi_eagle.worker", str(job.write())], log)
        try:
            return self._follow(stage, running, Path(job.folder))
        finally:
            running.cancel()

    def _publish(
        self, stage: StagePlan, folder: Path, production: dict[str, Any]
    ) -> dict[str, ArtifactRecord]:
        kind = KINDS[stage.kind]
        staged = folder / OUT / kind.output
        try:
            record = self.objects.describe(staged, kind.output)
        except ValueError as error:
            raise StageFailed(str(error)) from None
        self.objects.publish(staged, record, production)
        self.digests.flush()
        return {kind.output: record}

    def _job(
        self,
        loaded: LoadedManifest,
        stage: StagePlan,
        pins: Pins,
        settled: Mapping[str, ExecutionRecord],
        folder: Path,
    ) -> Job:
        params = loaded.manifest.stages[stage.name]
        inputs = {
            role: tuple(
                Given(item.record.digest, str(item.path), item.record.label) for item in items
            )
            for role, items in pins.stages[stage.name].items()
        }
        for role, source in loaded.manifest.upstream(stage.name):
            digest = settled[source].outputs[KINDS[settled[source].kind].output]
            inputs[role] = (Given(digest, str(self.objects.path(digest)), source),)
        return Job(
            stage=stage.name,
            kind=stage.kind,
            params=params.model_dump(mode="json"),
            inputs=inputs,
            verifier=str(pins.verifier.path.absolute()),
            folder=str(folder),
            root=str(self.root),
            registry=str(self.root / FILE),
        )

    def _follow(self, stage: StagePlan, running: LocalJob, folder: Path) -> int:
        """Pass events on and take shards in until the job ends; returns its exit code."""
        events = EventReader(folder / EVENTS)
        while True:
            code = running.poll()
            for event in events.new():
                if event["event"] == "shard":
                    self._take_shard(folder / SHARDS / event["name"])
                else:
                    self._reporter.stage_event(stage, event)
            if code is not None:
                return code
            time.sleep(_POLL_SECONDS)

    def _take_shard(self, staged: Path) -> None:
        """Publish a shard that a worker finished: rename first, then make its rows findable."""
        digest, size = self.digests.of(staged)
        rows = json.loads(staged.with_suffix(".json").read_text("utf-8"))["rows"]
        target = shard_path(self.root, digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.chmod(0o444)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.with_suffix(".json").rename(target.with_suffix(".json"))
        staged.rename(target)
        sync_folder(target.parent)
        self.registry.add_shard(
            ShardRecord(digest, size, tuple((r[0], r[1], r[2], r[3]) for r in rows))
        )
        self.digests.remember(target, digest)

    def _came_to_its_end(
        self, stage: StagePlan, code: int, result: Mapping[str, Any] | None, log: Path
    ) -> None:
        """Raises: StageFailed, with what the worker said or else the end of its log."""
        if result is not None and "error" in result:
            raise StageFailed(str(result["error"]))
        if code != 0 or result is None:
            signalled = code - 128 if code > 128 else -code
            how = f"was ended by signal {signalled}" if signalled > 0 else f"ended with code {code}"
            raise StageFailed(
                f"the worker of {stage.name} {how}; the end of its log:\n{log_tail(log)}"
            )

    def _unchanged(self, stage: StagePlan, pins: Pins) -> None:
        """Raises: StageFailed when an input from outside is not as it was pinned any more."""
        for items in pins.stages[stage.name].values():
            for item in items:
                changed = item.changed()
                if changed is not None:
                    raise StageFailed(
                        f"{changed} changed while {stage.name} was under way: what was made of it "
                        "is not kept; submit again"
                    )

    def _clear_dead(self) -> None:
        """Give runs whose coordinator died their end, and clear what they left in staging."""
        for run in self.registry.list_runs():
            if run.status == "running" and not held(self.root / run.id / ALIVE):
                self.registry.abandon_running(run.id, "interrupted")
                self.registry.end_run(run.id, "interrupted")
        staging = self.root / STAGING
        for folder in staging.iterdir() if staging.is_dir() else ():
            run_id = folder.name.split("-")[0]
            if not held(self.root / run_id / ALIVE):
                shutil.rmtree(folder, ignore_errors=True)


def _members(stage: StagePlan, pins: Pins) -> list[ArtifactRecord]:
    return [
        member
        for items in pins.stages[stage.name].values()
        for item in items
        for member in member_records(item)
    ]


@contextmanager
def _interruptible() -> Iterator[None]:
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
    for name in ("rows_extracted", "tokens_extracted"):
        if name in metrics:
            metrics[name] = 0
    return metrics


def log_tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
