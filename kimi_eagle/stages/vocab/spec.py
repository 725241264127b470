"""rows → t2d (which verifier tokens the draft knows), d2t (offsets back), a coverage report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    Determinism,
    External,
    Reference,
    StageKind,
    StageParams,
    VerifierFiles,
)
from kimi_eagle.verifiers.facts import VerifierFacts


class VocabParams(StageParams):
    kind: Literal["vocab"]
    rows: Annotated[str, Reference("prepare", "regenerate")]
    size: Annotated[int, Field(ge=1)] | None = None
    """Tokens the draft can propose; null is the verifier's whole vocabulary (no mapping)."""


class Vocab(StageKind):
    name = "vocab"
    summary = "choose the draft vocabulary by frequency over the supervised tokens"
    params: ClassVar[type[StageParams]] = VocabParams
    output = "vocab"
    code_version = 1
    determinism = Determinism("bitwise")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {"tokenizer": (VerifierFiles("tokenizer"),)}

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        found = super().identity(params, facts)
        found["verifier_vocab_size"] = facts.vocab_size
        return found
