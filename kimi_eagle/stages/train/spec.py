"""states + vocab + head → a checkpoint of the EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from kimi_eagle.stages.contract import (
    OUTSIDE_KEY,
    Determinism,
    External,
    Model,
    Reference,
    StageKind,
    StageParams,
    StoredArtifact,
)
from kimi_eagle.verifiers.facts import VerifierFacts

Positive = Annotated[int, Field(ge=1)]

# Schedules whose rate at a step does not depend on how many steps there are.
STEADY = ("constant", "none")


class Noise(Model):
    """Noise added to the aux hidden states while training, seeded per row and epoch."""

    kind: Literal["uniform", "gaussian"] = "uniform"
    """`uniform`: from [-std, std]; `gaussian`: with standard deviation `std`."""
    std: Annotated[float, Field(ge=0)] = 0.05


class RopeScaling(Model):
    """Scaling of the rotary embedding, in transformers' terms."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: Annotated[float, Field(ge=1)] | None = None
    """Required but for `default`."""
    original_max_position_embeddings: Positive | None = None
    beta_fast: Annotated[float, Field(gt=0)] | None = None
    beta_slow: Annotated[float, Field(gt=0)] | None = None
    mscale: Annotated[float, Field(gt=0)] | None = None
    mscale_all_dim: Annotated[float, Field(gt=0)] | None = None
    low_freq_factor: Annotated[float, Field(gt=0)] | None = None
    high_freq_factor: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> RopeScaling:
        if self.rope_type != "default" and self.factor is None:
            raise ValueError(f"rope_type {self.rope_type} needs a factor")
        return self


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
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Null: the verifier's (50000 for Kimi-K2.5)."""
    rope_scaling: RopeScaling | None = None
    """Null: the verifier's (YaRN, factor 64 over 4096, for Kimi-K2.5)."""


class Keep(Model):
    """Which saved checkpoints of a training stay, and which becomes the stage's own."""

    best: Annotated[int, Field(ge=0)] = 1
    """So many ends of epochs with the lowest validation loss; with 1 or more, the best epoch's
    weights become the stage's checkpoint, with 0 the last epoch's."""
    last: Positive = 2
    """So many that were saved last: what an interrupted training goes on from."""
    every: Positive | None = None
    """The end of every so many epochs, besides."""


class TrainParams(StageParams):
    kind: Literal["train"]
    head: Annotated[str, Reference("head")]
    states: Annotated[str, Reference("extract", "import_states")]
    vocab: Annotated[str | None, Reference("vocab")] = None
    """The draft's vocabulary; only with `init_from` it may be left out, and must be the
    checkpoint's own if it is not."""
    init_from: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4,64}$")] | None = None
    """Hash of a checkpoint in this registry whose weights and vocabulary training starts from."""
    epochs: Positive = 3
    lr: Annotated[float, Field(gt=0)] = 3e-5
    optimizer: Literal["adamw", "muon"] = "adamw"
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's."""
    muon_lr: Annotated[float, Field(gt=0)] = 0.02
    """Learning rate of Muon's matrices; `lr` then drives the rest."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    muon_weight_decay: Annotated[float, Field(ge=0)] = 0.1
    muon_steps: Positive = 5
    """Newton-Schulz iterations."""
    scheduler: Literal["linear", "cosine", "constant", "none"] = "linear"
    """`linear` and `cosine` fall to 0 over all steps of all epochs: what they do at a step depends
    on `epochs`. `constant` stays after the warm-up, `none` has no warm-up either."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the optimizer steps over which the learning rate rises (linear, cosine)."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """So many steps instead; `constant` has no other warm-up."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient of all parameters together; null: as it comes."""
    ttt_steps: Positive = 3
    """Training-time test steps: how many tokens ahead the draft is unrolled."""
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of step k's loss: this to the power of k."""
    loss: Literal["kl_div", "ce", "rkl", "jsd", "tv", "nla", "lk_hybrid"] = "kl_div"
    """speculators' losses, per position and over the draft's vocabulary: `kl_div`, reverse (`rkl`)
    and Jensen-Shannon (`jsd`) divergence from the verifier's distribution; `ce` against its most
    likely token; total variation (`tv`), negative log acceptance (`nla`), and their hybrid with
    `kl_div` (`lk_hybrid`). The first two are computed fastest."""
    noise: Noise | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    batch_tokens: Annotated[int, Field(ge=16)] = 8192
    """Tokens packed into one batch; a row that is longer is cut to it."""
    accumulate: Positive = 1
    """Batches to an optimizer step; several devices share them."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """`bf16`: products in bf16, weights and optimizer in fp32; `fp32`: everything in fp32."""
    draft: DraftArchitecture = DraftArchitecture()
    attention: Literal["auto", "flex", "sdpa", "eager"] = "auto"
    """`auto`: flex attention on a GPU, eager (row by row) on a CPU."""
    deterministic: bool = False
    """Ask for deterministic kernels on a GPU; a CPU has no others."""
    cpu_threads: Positive = 2
    """Threads on a CPU. Large products and sums are split by their number, so that it is part of
    what is made; it does not follow the machine's cores or OMP_NUM_THREADS. A GPU has no use for
    it."""
    keep: Literal["best", "last"] | Keep = Keep()
    """`best` and `last` are short for `{best: 1}` and `{best: 0}`."""
    min_agreement: Annotated[float, Field(ge=0, le=1), OUTSIDE_KEY] = 0.97
    """Least share of probed positions where the most likely token that the loss aims at is that
    of the verifier's norm and head applied apart; bf16 does not reach 1 at near ties."""
    save_steps: Annotated[Positive | None, OUTSIDE_KEY] = None
    """Save a checkpoint to go on from every so many steps, besides the end of each epoch."""
    save_minutes: Annotated[float | None, Field(gt=0), OUTSIDE_KEY] = 30.0
    """And whenever this long has passed since the last."""
    loader_workers: Annotated[int, Field(ge=0), OUTSIDE_KEY] = 0
    """Threads that read batches ahead; 0 reads each when it is needed."""
    log_steps: Annotated[Positive, OUTSIDE_KEY] = 10
    """On a GPU, figures are read off the device every so many steps; each step is logged."""
    devices: Annotated[Positive, OUTSIDE_KEY] = 1
    """Processes of one device each that share the batches of a step (`accumulate`), and the
    optimizer: its state and its step, parameter by parameter. With `resources: {nodes: N}` there
    are so many on each node."""

    @model_validator(mode="after")
    def _has_a_vocabulary(self) -> TrainParams:
        if self.vocab is None and self.init_from is None:
            raise ValueError(
                "vocab is required: name a stage of kind vocab (only with init_from it may be "
                "left out)"
            )
        return self

    @model_validator(mode="after")
    def _devices_have_work(self) -> TrainParams:
        if self.processes > self.accumulate:
            nodes = self.resources.nodes
            on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
            raise ValueError(
                f"{self.processes} devices{on_nodes} share the batches of an optimizer step, of "
                f"which there are {self.accumulate}: raise `accumulate` to a multiple of `devices`"
                f"{' times `nodes`' if nodes > 1 else ''}"
            )
        return self

    @property
    def processes(self) -> int:
        """How many share the batches of a step, on all nodes."""
        return self.devices * self.resources.nodes

    @property
    def retention(self) -> Keep:
        """`keep`, written out."""
        if isinstance(self.keep, Keep):
            return self.keep
        return Keep(best=1 if self.keep == "best" else 0)


class Train(StageKind):
    name = "train"
    summary = "train the draft, exactly: resumed or not, the same bytes"
    params: ClassVar[type[StageParams]] = TrainParams
    output = "checkpoint"
    code_version = 5
    determinism = Determinism("bitwise-like-hardware")
    settings: ClassVar[Mapping[str, str]] = {
        # Threads may outnumber cores (`cpu_threads`): those that wait must not take the core from
        # those that work, and no library may use fewer than it is told to.
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_DYNAMIC": "FALSE",
        # No AMX, which adds up in another order than AVX-512 does. On a crowded machine trainings
        # came out in other bytes now and then; what else would explain that was not found. It
        # costs a third of the speed on a CPU that has AMX.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    }
    inherits: ClassVar[Mapping[str, tuple[str, str]]] = {"rows": ("states", "rows")}

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        if params.init_from is None:
            return {}
        return {"init_from": (StoredArtifact(params.init_from, "checkpoint"),)}

    @classmethod
    def identity(cls, params: Any, facts: VerifierFacts) -> dict[str, Any]:
        found = super().identity(params, facts)
        del found["init_from"]  # its digest is among the inputs
        # How many are kept changes nothing; which of them the stage's checkpoint is, does.
        found["keep"] = "best" if params.retention.best else "last"
        if params.optimizer != "muon":  # what changes nothing must not change the key
            for name in ("muon_lr", "muon_momentum", "muon_weight_decay", "muon_steps"):
                del found[name]
        if params.scheduler in STEADY or params.warmup_steps is not None:
            del found["warmup_ratio"]
        if params.scheduler == "none":
            del found["warmup_steps"]
        return found


def trajectory_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a training's state after step N depends on, of the document that its key is of.

    Two trainings with one trajectory take the same steps as far as both go, so that each can go
    on from what the other saved. A schedule that falls over all steps makes the number of epochs
    part of it; with `constant` and `none` more epochs go on where fewer ended.
    """
    parameters = dict(document["parameters"])
    if parameters.get("scheduler") in STEADY:
        parameters.pop("epochs", None)
    return {**document, "parameters": parameters}
