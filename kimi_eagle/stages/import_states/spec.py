"""rows + the states that another program made of them → the same artifact as `extract`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    OUTSIDE_KEY,
    Determinism,
    External,
    Reference,
    SourceFiles,
    StageKind,
    StageParams,
    VerifierFiles,
)
from kimi_eagle.stages.import_rows.spec import Samples
from kimi_eagle.verifiers.facts import VerifierFacts


class ImportStatesParams(StageParams):
    kind: Literal["import_states"]
    rows: Annotated[str, Reference("prepare", "import_rows")]
    format: Literal["v1", "speculators"]
    """`v1`: `data_N.pt` or `data_N.safetensors` of speculators 0.3.0; `speculators`:
    `hs_N.safetensors`. Which file is of which row its token ids say, never its number."""
    samples: Samples
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """The aux layers that the files hold, in order, counting the input embeddings as 0; the last
    layer's output before the final norm must follow them."""
    axes: Literal["tokens,layers,hidden", "layers,tokens,hidden"] = "tokens,layers,hidden"
    """The order of the axes in files that hold one tensor; a list of layers needs none."""
    dtype: Literal["bfloat16"] = "bfloat16"
    """Other types are taken where nothing is lost by it."""
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of supervised tokens that the state before must give. What the verifier itself wrote
    reaches about 0.97 at temperature 0; what others wrote does not, so that without it only
    another order of layers or axes, or states after the norm, are found out."""
    max_bad_rows: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = 0
    """Rows that may be without states (no file, not finite, all zero): how many, or below 1 which
    share of the rows."""
    keep: Annotated[Literal["all", "none"], OUTSIDE_KEY] = "all"
    """As in `extract`."""
    shard_bytes: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 512 * 1024 * 1024
    """About how large one shard of the state store becomes."""


class ImportStates(StageKind):
    name = "import_states"
    summary = "check existing hidden states and take them into the state store"
    params: ClassVar[type[StageParams]] = ImportStatesParams
    output = "states"
    code_version = 1
    determinism = Determinism("bitwise")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {
            "verifier": (VerifierFiles("whole"),),
            "samples": (SourceFiles(params.samples.path, records=False),),
        }

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        found = super().identity(params, facts)
        found["layers"] = list(facts.aux_layers(params.layers))
        return found
