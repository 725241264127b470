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
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.artifacts.locks import Lock, held
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.attempt import Attempts, StageInputs
from kimi_eagle.history import History
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.manifest.model import resolved
from kimi_eagle.outcome import Reporter, RunOutcome, StageOutcome, outcome_document
from kimi_eagle.pins import Pins, pin
from kimi_eagle.plan import RUN, StagePlan, plan, versions_of
from kimi_eagle.provenance import environment
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.schema import RegistryError
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.stages.catalog import KINDS

# Folders directly under the root that are not runs.
ALIVE = ".alive"
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
        self._attempts = Attempts(self.root, self.registry, self.objects, self.digests, reporter)
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
            write_json(folder / "outcome.json", outcome_document(outcome))
        return outcome

    def end(self, run_id: str, status: str) -> None:
        """Record how a run ended."""
        unfinished = "interrupted" if status == "interrupted" else "failed"
        self.registry.abandon_running(run_id, unfinished)
        self.registry.end_run(run_id, status)

    @contextmanager
    def recording(
        self, run_id: str, loaded: LoadedManifest, kind: str = "submit"
    ) -> Iterator[None]:
        """Record that a run of a kind (`submit`, `reproduce`) began, and hold its sign of life."""
        folder = self.root / run_id
        folder.mkdir(parents=True)
        write_text(folder / "manifest.yaml", loaded.text)
        write_json(folder / "resolved.json", resolved(loaded.manifest))
        write_json(folder / "environment.json", environment())
        with Lock(folder / ALIVE):
            self.registry.begin_run(
                run_id,
                kind=kind,
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
                self._reuse(outcome, stage, stage.made, self._given(loaded, stage, pins, settled))
            waiting = [stage for stage in stages if stage.action == RUN]
            if not waiting:
                return
            stage = waiting[0]
            with self._sole(stage):
                made = self.registry.made_by_key(str(stage.key))
                if made is not None and self.history.trouble(made) is None:
                    continue  # another run made it meanwhile: the next plan reuses it
                result = self._attempts.execute(
                    outcome.run_id, stage, self._given(loaded, stage, pins, settled)
                )
            outcome.stages.append(result)
            self._reporter.stage_ended(result)
            if result.disposition != "executed":
                return
            fresh = self.registry.made_by_key(str(stage.key))
            assert fresh is not None, "an executed stage is in the registry"
            settled[stage.name] = fresh

    def _reuse(
        self, outcome: RunOutcome, stage: StagePlan, made: ExecutionRecord, given: StageInputs
    ) -> None:
        self.registry.reuse_execution(
            outcome.run_id, stage.name, made, given.records(stage), given.members()
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
        staging = self.root / STAGING
        for folder in staging.iterdir() if staging.is_dir() else ():
            run_id = folder.name.split("-")[0]
            if not held(self.root / run_id / ALIVE):
                shutil.rmtree(folder, ignore_errors=True)


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
    for name in ("rows_extracted", "tokens_extracted"):
        if name in metrics:
            metrics[name] = 0
    return metrics
