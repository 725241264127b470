"""checkpoint + its evaluation → config.json, model.safetensors, model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kimi_eagle.stages.contract import (
    Determinism,
    External,
    Model,
    Reference,
    StageKind,
    StageParams,
    VerifierFiles,
)

Share = Annotated[float, Field(ge=0, le=1)]
AtLeastOne = Annotated[float, Field(ge=1)]


class Gate(Model):
    """What an evaluation must show before the checkpoint is released."""

    min_acceptance_length: AtLeastOne = 1.0
    """Pooled over all sets, the bonus token included."""
    min_of_sets: dict[str, AtLeastOne] = Field(default_factory=dict)
    """The same for single sets, by their names."""
    min_first_position: Share = 0.0
    """Share of the draft steps whose first token was accepted."""
    max_simulated_gap: Annotated[float, Field(ge=0)] | None = None
    """How far the acceptance length that was simulated from stored states may lie from the served
    one, relative to it: 0.05 is 5 %. The evaluation then needs `states`."""
    outputs_identical: bool = False
    """Whether outputs with the draft must equal those without it."""
    min_output_agreement: Share | None = None
    """Share of the outputs with the draft that must equal those without it; in batches, of those
    that are equal between two runs without it."""
    served_elsewhere: bool = False
    """Whether an evaluation at an `endpoint` counts, of whose draft nothing is proven."""
    refuse_collapse: bool = True
    """Whether a draft that never helps, or is right once and then never again, is refused: it is
    what a draft looks like whose engine feeds it other states than its training did."""


class Push(Model):
    """Where a release is put besides the store: a folder, or a repository of the Hugging Face Hub.

    What lies there already is replaced only with `overwrite`; where it is the same, nothing is
    done.
    """

    folder: Annotated[str, Field(pattern=r"^[/~]")] | None = None
    """An absolute path."""
    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """`owner/name`; the token is read from the environment (HF_TOKEN)."""
    private: bool = True
    """Whether a repository that is made is private."""
    overwrite: bool = False

    @model_validator(mode="after")
    def _one_place(self) -> Push:
        if (self.folder is None) == (self.repository is None):
            raise ValueError("needs one of `folder` and `repository`")
        return self


class ExportParams(StageParams):
    kind: Literal["export"]
    checkpoint: Annotated[str, Reference("train")]
    evaluation: Annotated[str, Reference("evaluate")]
    target: Literal["vllm", "sglang"] = "vllm"
    """`vllm`: speculators' form, which vLLM and speculators read; `sglang`: a plain
    `LlamaForCausalLMEagle3` with names and layer ids as SGLang reads them."""
    gate: Gate = Gate()
    base_model: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][\w.-]*(/[A-Za-z0-9_-][\w.-]*)?$")] | None
    ) = None
    """The verifier's public name for the model card, for example `moonshotai/Kimi-K2.5`: no path of
    this machine."""
    license: Annotated[str, Field(min_length=1)] = "apache-2.0"
    push: Push | None = None


class Export(StageKind):
    name = "export"
    summary = "gate the checkpoint on its evaluation and write the folder that serving loads"
    params: ClassVar[type[StageParams]] = ExportParams
    output = "release"
    code_version = 2
    determinism = Determinism("bitwise")
    # For the model card: which data, which vocabulary.
    inherits: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rows": ("checkpoint", "states", "rows"),
        "vocab": ("checkpoint", "vocab"),
    }

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {"verifier": (VerifierFiles("whole"),)}

    @classmethod
    def again(cls, params: Any) -> Any:
        return params.model_copy(update={"push": None})
