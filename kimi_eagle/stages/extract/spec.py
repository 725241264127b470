"""rows + verifier → hidden states of the aux layers and of the last, found again by row key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    OUTSIDE_KEY,
    Determinism,
    External,
    Reference,
    StageKind,
    StageParams,
    VerifierFiles,
)
from kimi_eagle.stages.engine import Engine, ExtractEngine
from kimi_eagle.verifiers.facts import VerifierFacts


class ExtractParams(StageParams):
    kind: Literal["extract"]
    rows: Annotated[str, Reference("prepare", "regenerate", "import_rows")]
    layers: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | Literal["default"]
    ) = "default"
    """Aux layers, counting the input embeddings as 0 (transformers' `hidden_states[i]`, vLLM's
    and speculators' ids). `default`: 2, the middle, and the third from the end. The last layer's
    output before the final norm is always taken as well."""
    dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """`fp8` halves what states take: e4m3, with a scale for each token and layer. It is another
    identity; what it changes of the states is measured (`fp8_error`: by layer, relative)."""
    engine: Engine = ExtractEngine()
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.97
    """Share of the rows whose next token, computed from the last state through the final norm and
    the output head, must be the engine's own; below it the layer convention is wrong."""
    max_bad_rows: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = 0
    """Rows whose states may be refused (not finite, all zero, of other tokens): how many, or below
    1 which share of the rows. They are counted and listed, and training leaves them out; one more
    fails the stage."""
    keep: Annotated[Literal["all", "none"], OUTSIDE_KEY] = "all"
    """`none`: once the run's stages that take these states are done, the states are evicted as
    `gc` does it, so that a disk holds one training's at a time; who needs them later has them
    extracted again."""
    shard_bytes: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 512 * 1024 * 1024
    """About how large one shard of the state store becomes."""


class Extract(StageKind):
    name = "extract"
    summary = "run the verifier once over rows that the state store lacks"
    params: ClassVar[type[StageParams]] = ExtractParams
    output = "states"
    code_version = 1
    determinism = Determinism("tolerance", "cosine distance per token of the last layer", 0.02)

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {"verifier": (VerifierFiles("whole"),)}

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        found = super().identity(params, facts)
        found["layers"] = list(facts.aux_layers(params.layers))
        if not params.max_bad_rows:
            del found["max_bad_rows"]  # as before there was one: keys of that time stay good
        return found
