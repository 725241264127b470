"""states + vocab + head → a checkpoint of the EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    OUTSIDE_KEY,
    Determinism,
    Model,
    Reference,
    StageKind,
    StageParams,
)
from kimi_eagle.verifiers.facts import VerifierFacts

Positive = Annotated[int, Field(ge=1)]


class Noise(Model):
    """Noise added to the aux hidden states while training, seeded per row and epoch."""

    kind: Literal["uniform", "gaussian"] = "uniform"
    """`uniform`: from [-std, std]; `gaussian`: with standard deviation `std`."""
    std: Annotated[float, Field(ge=0)] = 0.05


class DraftArchitecture(Model):
    """The draft's decoder; null takes the verifier's value."""

    layers: Positive = 1
    heads: Positive | None = None
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    """Null: the verifier's; for MLA its value head dimension (128 for Kimi-K2.5)."""
    intermediate_size: Positive | None = None
    """Null: that of the verifier's dense layers (18432 for Kimi-K2.5)."""
    norm_before_residual: bool = False
    sliding_window: Positive | None = None
    """Null: full attention."""


class TrainParams(StageParams):
    kind: Literal["train"]
    head: Annotated[str, Reference("head")]
    states: Annotated[str, Reference("extract", "import_states")]
    vocab: Annotated[str, Reference("vocab")]
    epochs: Positive = 3
    lr: Annotated[float, Field(gt=0)] = 3e-5
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr: Annotated[float, Field(gt=0)] = 0.02
    """Learning rate of Muon's matrices; `lr` then drives the rest."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    scheduler: Literal["linear", "cosine", "none"] = "linear"
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the optimizer steps over which the learning rate rises."""
    ttt_steps: Positive = 3
    """Training-time test steps: how many tokens ahead the draft is unrolled."""
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    loss: Literal["kl_div", "ce"] = "kl_div"
    noise: Noise | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    batch_tokens: Annotated[int, Field(ge=16)] = 8192
    """Tokens packed into one step; a row that is longer is cut to it."""
    draft: DraftArchitecture = DraftArchitecture()
    attention: Literal["auto", "flex", "sdpa", "eager"] = "auto"
    """`auto`: flex attention on a GPU, sdpa on a CPU."""
    keep: Literal["best", "last"] = "best"
    """Which epoch's weights become the checkpoint: lowest validation loss, or the last."""
    loader_workers: Annotated[int, Field(ge=0), OUTSIDE_KEY] = 0


class Train(StageKind):
    name = "train"
    summary = "train the draft with speculators' EAGLE-3 model and losses"
    params: ClassVar[type[StageParams]] = TrainParams
    output = "checkpoint"
    code_version = 1
    determinism = Determinism("bitwise-like-hardware")
    inherits: ClassVar[Mapping[str, tuple[str, str]]] = {"rows": ("states", "rows")}

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        found = super().identity(params, facts)
        if params.optimizer != "muon":
            del found["muon_lr"]  # it changes nothing then, so it must not change the key
        return found
