"""How a run and its stages come out, and who is told as it goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kimi_eagle.plan import StagePlan
from kimi_eagle.records import ExecutionRecord


class Reporter(Protocol):
    """Who is told how a run goes."""

    def run_started(self, run_id: str, folder: Path) -> None: ...

    def stage_reused(self, stage: StagePlan, made: ExecutionRecord) -> None: ...

    def stage_started(self, stage: StagePlan) -> None: ...

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None: ...

    def stage_ended(self, outcome: StageOutcome) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class StageOutcome:
    """How one stage of a run came out."""

    name: str
    kind: str
    disposition: str
    key: str
    outputs: Mapping[str, str]
    metrics: Mapping[str, Any]
    seconds: float
    error: str | None = None
    log: Path | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What it took, as `records.ExecutionRecord` has it."""


@dataclass
class RunOutcome:
    run_id: str
    status: str
    stages: list[StageOutcome] = field(default_factory=list)


def outcome_document(outcome: RunOutcome) -> dict[str, Any]:
    """A run's outcome as `submit --json` prints it."""
    return {
        "run_id": outcome.run_id,
        "status": outcome.status,
        "stages": [
            {
                "name": stage.name,
                "kind": stage.kind,
                "disposition": stage.disposition,
                "key": stage.key,
                "outputs": dict(stage.outputs),
                "metrics": dict(stage.metrics),
                "seconds": stage.seconds,
                **({"error": stage.error} if stage.error else {}),
            }
            for stage in outcome.stages
        ],
    }
