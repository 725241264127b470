"""The forward pass of a draft and its losses on a device, compiled where that works. Imports torch.

Which of the two it was is part of a training's record: compiled kernels round otherwise.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kimi_eagle.draft.batches import PackedBatch
from kimi_eagle.draft.kernels import Kernels
from kimi_eagle.draft.losses import Heads
from kimi_eagle.draft.unroll import Unroll
from kimi_eagle.stages.train.spec import TrainParams


@dataclass(frozen=True)
class Compute:
    """What a trainer runs a batch through."""

    unroll: Unroll
    heads: Heads
    attention: str
    compiled: bool


def seed_everything(params: TrainParams) -> None:
    """Fix what a training would otherwise take from the process it runs in: generators, kernels,
    and how many threads sums are split over."""
    random.seed(params.seed)
    np.random.seed(params.seed % 2**32)
    torch.manual_seed(params.seed)
    if torch.cuda.is_available():
        if params.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        torch.set_num_threads(params.cpu_threads)
    torch.use_deterministic_algorithms(params.deterministic)


def dtype_of(params: TrainParams) -> Any:
    """The type of the products."""
    return torch.bfloat16 if params.precision == "bf16" else torch.float32


def compute_of(model: Any, params: TrainParams, attention: str, *, compiled: bool) -> Compute:
    """Args: `attention`: flex, sdpa or eager."""
    dtype, kernels = dtype_of(params), Kernels(compiled=compiled)
    unroll = Unroll(
        model, steps=params.ttt_steps, attention=attention, dtype=dtype, kernels=kernels
    )
    heads = Heads(
        model, loss=params.loss, decay=params.ttt_step_loss_decay, dtype=dtype, kernels=kernels
    )
    return Compute(unroll, heads, attention, compiled)


def that_works(
    model: Any,
    params: TrainParams,
    device: Any,
    batch: PackedBatch,
    tell: Callable[[str], None],
) -> Compute:
    """Compiled kernels on a GPU, proven on a batch; plain ones where this torch cannot compile
    them, which `tell` hears of.

    `auto` attention is flex where it compiles, and otherwise sdpa on a GPU, eager on a CPU.
    """
    on_gpu = device.type == "cuda"
    asked = params.attention
    if not on_gpu:
        return compute_of(model, params, "eager" if asked == "auto" else asked, compiled=False)
    found = compute_of(model, params, "flex" if asked == "auto" else asked, compiled=True)
    try:
        totals = [len(at) for at in batch.starts]
        loss, _ = found.heads(found.unroll(batch), batch, totals)
        loss.backward()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and none is ours
        first = str(error).strip().splitlines()
        tell(
            f"this torch cannot compile the kernels ({type(error).__name__}: "
            f"{first[0] if first else ''}): training runs without, more slowly"
        )
        plain = "sdpa" if asked in ("auto", "flex") else asked
        found = compute_of(model, params, plain, compiled=False)
    finally:
        model.zero_grad(set_to_none=True)
    return found
