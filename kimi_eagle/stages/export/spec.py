"""checkpoint + its evaluation → config.json, model.safetensors, model card."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import Determinism, Model, Reference, StageKind, StageParams


class Gate(Model):
    """What an evaluation must show before the checkpoint is released."""

    min_acceptance_length: Annotated[float, Field(ge=1)] = 1.0
    """Pooled, the bonus token included."""
    min_first_position: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the draft steps whose first token was accepted."""
    outputs_identical: bool = False
    """Whether outputs with the draft must equal those without it."""
    refuse_collapse: bool = True
    """Whether a draft that never helps, or is right once and then never again, is refused: it is
    what a draft looks like whose engine feeds it other states than its training did."""


class ExportParams(StageParams):
    kind: Literal["export"]
    checkpoint: Annotated[str, Reference("train")]
    evaluation: Annotated[str, Reference("evaluate")]
    gate: Gate = Gate()
    base_model: Annotated[str, Field(min_length=1)] | None = None
    """The verifier's public name for the model card, for example `moonshotai/Kimi-K2.5`."""
    license: Annotated[str, Field(min_length=1)] = "apache-2.0"


class Export(StageKind):
    name = "export"
    summary = "gate the checkpoint on its evaluation and write the folder that serving loads"
    params: ClassVar[type[StageParams]] = ExportParams
    output = "release"
    code_version = 1
    determinism = Determinism("bitwise")
