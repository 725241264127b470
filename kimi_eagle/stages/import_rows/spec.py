"""sample files or an arrow folder of speculators → rows, as `prepare` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    EXTERNAL_PATH,
    Determinism,
    External,
    Model,
    SourceFiles,
    StageKind,
    StageParams,
)
from kimi_eagle.verifiers.facts import VerifierFacts


class Samples(Model):
    """Files that another trainer wrote."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """A glob, relative to the manifest. Only files of exactly the names of their format count."""


class ImportRowsParams(StageParams):
    kind: Literal["import_rows"]
    format: Literal["v1", "arrow"]
    """`v1`: `data_N.pt` or `data_N.safetensors` with `input_ids`, `loss_mask` (and
    `hidden_states`), as speculators 0.3.0 has them; `arrow`: the `*.arrow` files of a data set
    that speculators prepared, with `input_ids` and `loss_mask`."""
    samples: Samples
    val_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the rows kept apart for validation."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides which rows validate."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What a sample that cannot be used does: end the stage, or be counted and left out."""


class ImportRows(StageKind):
    name = "import_rows"
    summary = "take over the token ids and loss masks of existing samples"
    params: ClassVar[type[StageParams]] = ImportRowsParams
    output = "rows"
    code_version = 1
    determinism = Determinism("bitwise")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {"samples": (SourceFiles(params.samples.path, records=False),)}

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        # An id outside the vocabulary is refused.
        return {**super().identity(params, facts), "verifier_vocab_size": facts.vocab_size}
