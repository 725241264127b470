"""How a reproduction came out: stage by stage, and as a whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_eagle.comparison import Difference
from kimi_eagle.environments import changes, dirty
from kimi_eagle.run_record import StageRecord

REUSED = "reused"
IDENTICAL = "identical"
WITHIN_TOLERANCE = "within_tolerance"
DIFFERS = "differs"
CANNOT = "cannot"
INTERRUPTED = "interrupted"

# From best to worst: a reproduction is as good as its worst stage.
RANK = (REUSED, IDENTICAL, WITHIN_TOLERANCE, DIFFERS, CANNOT)


@dataclass(frozen=True)
class StageResult:
    """How one stage came out."""

    name: str
    kind: str
    status: str
    expected: str
    found: str | None
    differences: tuple[Difference, ...] = ()
    error: str | None = None


@dataclass
class Reproduction:
    """How a reproduction came out."""

    target: str
    run_id: str
    status: str = CANNOT
    stages: list[StageResult] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    """What of the environment changed: name, then, now, and the stages it was other for."""
    warnings: list[str] = field(default_factory=list)

    def compare_environments(self, stages: Sequence[StageRecord], now: Mapping[str, Any]) -> None:
        """Note what is another about the environment `now` than when `stages` were made."""
        found: dict[str, dict[str, Any]] = {}
        unclean: dict[str, list[str]] = {}
        for stage in stages:
            for change in changes(stage.environment, now):
                entry = {**asdict(change), "text": change.text(), "stages": []}
                found.setdefault(change.text(), entry)["stages"].append(stage.name)
            diff = dirty(stage.environment)
            if diff is not None:
                unclean.setdefault(diff, []).append(stage.name)
        self.changed = list(found.values())
        for diff, names in unclean.items():
            same = dirty(now) == diff
            self.warnings.append(
                f"{', '.join(names)}: made from a checkout with changes that were not committed "
                f"(their digest {diff}): the commit alone does not say what ran; the checkout here "
                + ("has the same changes" if same else "does not have them")
            )

    def document(self) -> dict[str, Any]:
        """As `reproduce --json` prints it."""
        return {
            "status": self.status,
            "hash": self.target,
            "run_id": self.run_id,
            "stages": [asdict(stage) for stage in self.stages],
            "environment": {"changed": self.changed},
            "warnings": self.warnings,
        }
