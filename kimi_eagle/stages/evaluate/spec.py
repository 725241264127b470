"""checkpoint + verifier + prompts → acceptance length, measured in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

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
from kimi_eagle.stages.engine import VllmEngine


class Prompts(Model):
    """Evaluation prompts, one JSON object a line."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """Lines with `messages`, `turns` (MT-Bench; the first turn is asked) or `prompt`."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """At most this many prompts, from the start."""


class EvaluateParams(StageParams):
    kind: Literal["evaluate"]
    checkpoint: Annotated[str, Reference("train")]
    prompts: Prompts
    draft_tokens: Annotated[int, Field(ge=1)] = 3
    """Tokens the draft proposes a step."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens generated a prompt, unless the verifier ends its turn before."""
    thinking: Literal["default", "never"] = "default"
    """`never` passes `thinking=false` to the chat template."""
    engine: VllmEngine = VllmEngine()


class Evaluate(StageKind):
    name = "evaluate"
    summary = "serve the draft in vLLM, one prompt at a time, with and without it"
    params: ClassVar[type[StageParams]] = EvaluateParams
    output = "evaluation"
    code_version = 2
    determinism = Determinism("bitwise-like-hardware")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {
            "verifier": (VerifierFiles("whole"),),
            "prompts": (SourceFiles(params.prompts.path),),
        }
