"""Curves of trainings as a run goes: written beside it, for TensorBoard, MLflow and wandb.

    runs/<run>/tensorboard/<stage>/events.out.tfevents.…
    runs/<run>/mlflow/   runs/<run>/wandb/      where the manifest asks for them

It hears what a reporter hears and passes it on. Nothing that goes wrong here ends a run: it is told
in one line, and the run goes on without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from kimi_eagle.curves import Curves, figures
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.outcome import Reporter, StageOutcome
from kimi_eagle.plan import StagePlan
from kimi_eagle.records import ExecutionRecord

TENSORBOARD = "tensorboard"
# A tracker that has not passed everything on by then is left behind.
_END_SECONDS = 60.0
_PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb"}


class TrackerFailed(Exception):
    """A tracker does not take what it is given; the message says why."""


class Sink(Protocol):
    """Where the points of one stage go. All methods raise: OSError, ValueError, TrackerFailed."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def end(self, *, done: bool) -> None: ...


class TensorBoardSink:
    """An event file; it is there once there is a point in it."""

    def __init__(self, folder: Path):
        from kimi_eagle.event_file import EventFile  # a run of unchanged stages has no use for it

        self._file = EventFile(folder)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._file.add(step, values)

    def end(self, *, done: bool) -> None:
        self._file.close()


class TrackerSink:
    """A process that hands points on (see `tracker`), fed by a file that it follows."""

    def __init__(self, tracker: str, folder: Path, stage: str, start: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._name = tracker
        self._log = folder / f"{stage}.log"
        spool = folder / f"{stage}.ndjson"
        self._spool = spool.open("w", encoding="utf-8")
        self._write({"tracker": tracker, "folder": str(folder), **start})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kimi_eagle.tracker", str(spool)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a ctrl-c is for the run, whose end it is told of
            )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self._process.poll() is not None:
            self._spool.close()
            raise TrackerFailed(self._why())
        self._write({"step": step, "at": time.time(), "values": dict(values)})

    def end(self, *, done: bool) -> None:
        self._write({"end": "done" if done else "failed"})
        self._spool.close()
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TrackerFailed(f"it took longer than {_END_SECONDS:g} s to end") from None
        if code != 0:
            raise TrackerFailed(self._why())

    def _write(self, line: Mapping[str, Any]) -> None:
        self._spool.write(json.dumps(line) + "\n")
        self._spool.flush()

    def _why(self) -> str:
        last = (self._log.read_text("utf-8", errors="replace").strip().splitlines() or [""])[-1]
        if last.startswith("ModuleNotFoundError"):
            return f"it is not installed: pip install {_PACKAGES[self._name]}"
        return f"it ended ({last or 'it said nothing'}); see {self._log}"


class TrainingLog:
    """A reporter that passes everything on to another, and writes curves of what it hears."""

    def __init__(self, reporter: Reporter, manifest: Manifest):
        self._reporter = reporter
        self._options = manifest.logging
        self._manifest = manifest.name
        self._prompts = {
            name: ", ".join(Path(given.path).stem for given in stage.named_sets.values())
            for name, stage in manifest.stages.items()
            if stage.kind == "evaluate"
        }
        """Evaluation → what its set of prompts is called."""
        self._run = ""
        self._folder = Path()
        self._stage: StagePlan | None = None
        self._curves = Curves()
        self._sinks: dict[str, Sink] | None = None
        """Of the stage under way, by name; None until it has a point."""
        self._given_up: set[str] = set()
        self._told = False
        self._steps: dict[str, int] = {}
        """Checkpoint → the optimizer steps that made it."""

    # What a reporter hears

    def run_started(self, run_id: str, folder: Path) -> None:
        self._run, self._folder = run_id, folder
        self._reporter.run_started(run_id, folder)

    def stage_reused(self, stage: StagePlan, made: ExecutionRecord) -> None:
        self._trained(made.outputs, made.metrics)
        self._reporter.stage_reused(stage, made)

    def stage_started(self, stage: StagePlan) -> None:
        self.close()
        self._stage, self._curves = stage, Curves()
        self._reporter.stage_started(stage)

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None:
        self._reporter.stage_event(stage, event)
        point = self._curves.point(event)
        if point is not None:
            self._add(stage, *point)

    def stage_ended(self, outcome: StageOutcome) -> None:
        done = outcome.error is None
        if done and outcome.kind == "evaluate" and self._stage is not None:
            self._evaluated(self._stage, outcome)
        elif self._sinks is not None and outcome.resources:
            self._to_all("add", self._curves.step, figures(outcome.resources, "perf"))
        self._end(done=done)
        self._reporter.stage_ended(outcome)
        if done and outcome.disposition == "executed":
            self._trained(outcome.outputs, outcome.metrics)

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def close(self) -> None:
        """End what a stage that was broken off has left open."""
        self._end(done=False)

    def _evaluated(self, stage: StagePlan, outcome: StageOutcome) -> None:
        """Log what an evaluation measured, at the step of the checkpoint that it is of."""
        checkpoints = stage.inputs.get("checkpoint", [])
        step = next((self._steps[c] for c in checkpoints if c in self._steps), 0)
        group = f"eval/{self._prompts.get(stage.name, stage.name)}"
        self._add(stage, step, figures(outcome.metrics, group))

    def _trained(self, outputs: Mapping[str, str], metrics: Mapping[str, Any]) -> None:
        if "checkpoint" in outputs and isinstance(metrics.get("steps"), int):
            self._steps[outputs["checkpoint"]] = metrics["steps"]

    def _add(self, stage: StagePlan, step: int, values: Mapping[str, float]) -> None:
        if self._sinks is None:
            self._sinks = {}
            self._open(stage)
        self._to_all("add", step, values)

    def _open(self, stage: StagePlan) -> None:
        from kimi_eagle.difference import flat  # it loads more than an unchanged run does in all

        options, document = self._options, stage.document or {}
        start = {
            "manifest": self._manifest,
            "name": f"{self._run}/{stage.name}",
            "key": stage.key,
            "parameters": flat(document.get("parameters", {})),
        }
        if options.tensorboard:
            self._try(TENSORBOARD, lambda folder: TensorBoardSink(folder / stage.name))
        for name in _PACKAGES:
            chosen = getattr(options, name)
            if chosen is not None:
                given = {**start, "options": chosen.model_dump(mode="json")}
                self._try(name, lambda f, n=name, g=given: TrackerSink(n, f, stage.name, g))
        if TENSORBOARD in (self._sinks or {}) and not self._told:
            self._told = True
            how = "" if find_spec(TENSORBOARD) else " (pip install tensorboard)"
            logs = self._folder / TENSORBOARD
            self._reporter.note(f"curves: tensorboard --logdir {logs}{how}")

    def _try(self, name: str, make: Any) -> None:
        assert self._sinks is not None, "they are being opened"
        if name not in self._given_up:
            try:
                self._sinks[name] = make(self._folder / name)
            except OSError as error:
                self._give_up(name, str(error))

    def _to_all(self, method: str, *arguments: Any, **named: Any) -> None:
        for name, sink in list((self._sinks or {}).items()):
            try:
                getattr(sink, method)(*arguments, **named)
            except (OSError, ValueError, TrackerFailed) as error:
                assert self._sinks is not None, "one of them is at hand"
                del self._sinks[name]
                self._give_up(name, str(error))

    def _give_up(self, name: str, why: str) -> None:
        self._given_up.add(name)
        self._reporter.note(f"no curves for {name} from here on: {why}; the run goes on")

    def _end(self, *, done: bool) -> None:
        self._to_all("end", done=done)
        self._sinks = None
