"""rows → t2d (which verifier tokens the draft knows), d2t (offsets back), a coverage report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kimi_eagle.stages.contract import (
    EXTERNAL_PATH,
    Determinism,
    External,
    Model,
    Reference,
    SourceFiles,
    StageKind,
    StageParams,
    VerifierFiles,
)
from kimi_eagle.verifiers.facts import VerifierFacts


class VocabMapFiles(Model):
    """A map that is there already, such as that of a draft to be trained further."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """A `.safetensors` with `t2d`, `d2t` or both (a draft's weights do), a `.npy` of one of them
    (`t2d.npy`, `d2t.npy`), or a glob of two of these; relative to the manifest."""
    d2t: Literal["auto", "offsets", "absolute"] = "auto"
    """What `d2t` holds: verifier id minus draft id, or verifier ids. `auto`: whichever holds
    together; refused where both do."""


class VocabParams(StageParams):
    kind: Literal["vocab"]
    rows: Annotated[str, Reference("prepare", "regenerate", "import_rows")]
    size: Annotated[int, Field(ge=1)] | Literal["full"] | None = None
    """Tokens the draft can propose; `full` or null is the verifier's whole vocabulary, unless
    `map` says otherwise."""
    include: (
        tuple[Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)], ...]
        | Literal["default"]
    ) = "default"
    """Tokens, by id or as the tokenizer writes them, that the draft knows however rare they are.
    `default`: the verifier's added tokens (end of turn, thinking, tool calls, …; runs of spaces
    apart) that occur among the supervised tokens of training rows."""
    map: VocabMapFiles | None = None
    """Take this map rather than choosing one; the rows then say what it covers."""

    @model_validator(mode="after")
    def _one_way(self) -> VocabParams:
        if self.map is not None and self.size == "full":
            raise ValueError("has both a map and `size: full`; leave one out")
        return self


class Vocab(StageKind):
    name = "vocab"
    summary = "choose the draft vocabulary by frequency over the supervised tokens"
    params: ClassVar[type[StageParams]] = VocabParams
    output = "vocab"
    code_version = 2
    determinism = Determinism("bitwise")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        found: dict[str, tuple[External, ...]] = {"tokenizer": (VerifierFiles("tokenizer"),)}
        if params.map is not None:
            found["map"] = (SourceFiles(params.map.path, records=False),)
        return found

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        found = super().identity(params, facts)
        if found["size"] == "full":
            found["size"] = None  # two ways to say one thing
        found["verifier_vocab_size"] = facts.vocab_size
        return found
