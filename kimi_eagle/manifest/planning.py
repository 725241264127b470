"""`plan:` in a manifest: what `kimi-eagle plan` reckons with where nothing is on record. Pure.

It is no part of any stage key, nor of what makes two manifests the same, and changes nothing of
what is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, field_validator

from kimi_eagle.manifest.problem import FieldProblem, closest
from kimi_eagle.sizes import parse_size
from kimi_eagle.stages.contract import Model

Figure = Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0, allow_inf_nan=False)]
ByStage = dict[str, Figure]


class Planning(Model):
    """What `plan` reckons with where nothing is on record. Nothing here is part of any key."""

    rates: ByStage = Field(default_factory=dict)
    """Stage: tokens a second of one worker of an extraction or a training."""
    rows: ByStage = Field(default_factory=dict)
    """Stage: how many rows a `prepare` or `regenerate` is expected to make."""
    tokens: ByStage = Field(default_factory=dict)
    """Stage: how many tokens they are expected to have, all rows together."""
    gpu_memory: Annotated[str, Field(min_length=1)] | None = None
    """Memory of one GPU that engines run on, `141GB` or `80GiB`."""

    @field_validator("gpu_memory")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value


def unknown_stages(planning: Planning, stages: Iterable[str]) -> list[FieldProblem]:
    """Figures for stages that there are not."""
    known = list(stages)
    found = []
    for field in ("rates", "rows", "tokens"):
        for name in getattr(planning, field):
            if name not in known:
                near = closest(name, known)
                hint = f"did you mean '{near}'?" if near else f"stages are {', '.join(known[:8])}"
                path = ("plan", field, name)
                found.append(FieldProblem(path, f"there is no stage '{name}'", hint))
    return found
