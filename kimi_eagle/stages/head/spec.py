"""verifier folder → text config, tokenizer, chat template, and embed_tokens, norm, lm_head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from kimi_eagle.stages.contract import (
    Determinism,
    External,
    StageKind,
    StageParams,
    VerifierFiles,
)


class HeadParams(StageParams):
    kind: Literal["head"]


class Head(StageKind):
    name = "head"
    summary = "take the embedding, final norm and output head out of the verifier"
    params: ClassVar[type[StageParams]] = HeadParams
    output = "head"
    code_version = 1
    determinism = Determinism("bitwise")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {"verifier": (VerifierFiles("whole"),)}
