"""The trainings of a run, best first: what `kimi-eagle rank` shows of the variants of a matrix.

$ kimi-eagle rank latest
#  STAGE          VAL_LOSS  ACCEPTANCE  LR      CHECKPOINT
1  draft--lr-3e-4  2.113     2.781       0.0003  3aae8e53c3d4
2  draft--lr-1e-4  2.289     2.604       0.0001  65ab9b0ba685
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kimi_eagle.difference import LOSS_SETTINGS, flat
from kimi_eagle.identity import short
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.search import Search
from kimi_eagle.registry.store import Registry

Measure = Literal["acceptance_length", "val_loss"]

# Inputs of a training over which its validation loss is, by role.
_MEASURED_OVER = ("head", "rows", "vocab")
_MADE = ("executed", "reused")


@dataclass(frozen=True)
class Trial:
    """A training, and one evaluation of what it made where there is one."""

    train: ExecutionRecord
    evaluation: ExecutionRecord | None = None

    @property
    def val_loss(self) -> float | None:
        """Of the epoch that was kept; None where it has not come to its end."""
        return self.train.metrics.get("val_loss") if self.train.disposition in _MADE else None

    @property
    def acceptance_length(self) -> float | None:
        """As served, the bonus token included; None where it was not measured."""
        return self.evaluation.metrics.get("acceptance_length") if self.evaluation else None

    def value(self, by: Measure) -> float | None:
        return self.acceptance_length if by == "acceptance_length" else self.val_loss

    def settings(self) -> dict[str, Any]:
        """What decides how it came out: parameters, and inputs by role; `evaluation.…` are of the
        evaluation."""
        found = _settings(self.train)
        if self.evaluation is not None:
            of_evaluation = _settings(self.evaluation)
            of_evaluation.pop("checkpoint", None)  # it is the training's, which has its own columns
            found |= {f"evaluation.{name}": value for name, value in of_evaluation.items()}
        return found


@dataclass(frozen=True)
class Ranking:
    """Trials, best first; those without a value come last."""

    run_id: str
    by: Measure
    trials: tuple[Trial, ...]
    varied: tuple[str, ...]
    """The settings that are not the same in all of them."""
    warnings: tuple[str, ...] = field(default=())
    """Why the order may say less than it seems to."""

    def document(self) -> dict[str, Any]:
        """As `rank --json` prints it."""
        return {
            "run_id": self.run_id,
            "by": self.by,
            "varied": list(self.varied),
            "warnings": list(self.warnings),
            "trials": [
                {
                    "rank": rank,
                    "stage": trial.train.stage,
                    "disposition": trial.train.disposition,
                    "checkpoint": trial.train.outputs.get("checkpoint"),
                    "val_loss": trial.val_loss,
                    "evaluation": trial.evaluation.stage if trial.evaluation else None,
                    "acceptance_length": trial.acceptance_length,
                    "settings": {
                        name: value
                        for name, value in trial.settings().items()
                        if name in self.varied
                    },
                }
                for rank, trial in self.numbered()
            ],
        }

    def numbered(self) -> list[tuple[int | None, Trial]]:
        """Trials with their ranks from 1; None for one without a value. Equal values share one."""
        found: list[tuple[int | None, Trial]] = []
        for index, trial in enumerate(self.trials):
            value = trial.value(self.by)
            if value is None:
                found.append((None, trial))
            elif index and value == self.trials[index - 1].value(self.by):
                found.append((found[-1][0], trial))
            else:
                found.append((index + 1, trial))
        return found


def rank(root: Path, prefix: str, by: Measure | None) -> Ranking:
    """The trainings of a run.

    Args:
        by: what to rank by; None: acceptance length where all were evaluated, else
            validation loss.

    Raises:
        RegistryError, UnknownDigest, AmbiguousDigest.
        LookupError: it has no stage of kind train.
    """
    registry = Registry(root, create=False)
    try:
        run = Search(registry).run(prefix)
        found = of_run(registry, run.id, by)
    finally:
        registry.close()
    if not found.trials:
        raise LookupError(
            f"run {run.id} has no stage of kind train to be ranked; `kimi-eagle runs "
            "--stage train` lists the runs that have"
        )
    return found


def of_run(registry: Registry, run_id: str, by: Measure | None = None) -> Ranking:
    """The trainings of a run that is known; none where it has none."""
    stages = [_measured(registry, stage) for stage in registry.stages_of(run_id)]
    return ranked(run_id, trials(stages), by)


def _measured(registry: Registry, stage: ExecutionRecord) -> ExecutionRecord:
    """A stage with what was recorded of it where it was executed, if it is reused."""
    if stage.reused_from is None:
        return stage
    made = registry.execution(stage.reused_from)
    return replace(stage, metrics=made.metrics, document=made.document)


def trials(stages: Sequence[ExecutionRecord]) -> list[Trial]:
    """Each training of a run with each evaluation of what it made, or without any."""
    found = []
    for train in (stage for stage in stages if stage.kind == "train"):
        checkpoint = train.outputs.get("checkpoint")
        evaluations = [
            stage
            for stage in stages
            if stage.kind == "evaluate"
            and stage.disposition in _MADE
            and checkpoint in _inputs(stage).get("checkpoint", ())
        ]
        found += [Trial(train, evaluation) for evaluation in evaluations] or [Trial(train)]
    return found


def ranked(run_id: str, found: Sequence[Trial], by: Measure | None) -> Ranking:
    """Put trials in order, and say what tells them apart."""
    if by is None:
        evaluated = all(trial.acceptance_length is not None for trial in found)
        by = "acceptance_length" if evaluated else "val_loss"

    def order(trial: Trial) -> tuple[bool, float]:
        value = trial.value(by)
        if value is None:
            return True, 0.0
        return False, -value if by == "acceptance_length" else value

    settings = [trial.settings() for trial in found]
    varied = tuple(
        name
        for name in dict.fromkeys(name for one in settings for name in one)
        if any(one.get(name) != settings[0].get(name) for one in settings)
    )
    return Ranking(run_id, by, tuple(sorted(found, key=order)), varied, _warnings(by, varied))


def _warnings(by: Measure, varied: Sequence[str]) -> tuple[str, ...]:
    if by == "val_loss":
        names = [name for name in varied if name in (*LOSS_SETTINGS, *_MEASURED_OVER)]
        said = "val_loss is of other things where {} differ: acceptance lengths can be compared"
    else:
        names = [name for name in varied if name.startswith("evaluation.")]
        said = "acceptance lengths were measured otherwise where {} differ"
    return (said.format(", ".join(names)),) if names else ()


def _inputs(stage: ExecutionRecord) -> Mapping[str, Sequence[str]]:
    return dict((stage.document or {}).get("inputs", {}))


def _settings(stage: ExecutionRecord) -> dict[str, Any]:
    inputs = {role: ", ".join(map(short, items)) for role, items in _inputs(stage).items()}
    return flat((stage.document or {}).get("parameters", {})) | inputs
