"""Learning rates by step. Pure: nothing to save, and nothing that a resumed training can lose."""

from __future__ import annotations

import math
from typing import Any


def warmup_of(params: Any, total: int) -> int:
    """Steps over which the rate rises.

    Args: `params`: of the train stage; `total`: optimizer steps in all, 0 where the schedule does
        not depend on it.
    """
    if params.scheduler == "none":
        return 0
    if params.warmup_steps is not None:
        return int(params.warmup_steps)
    return 0 if params.scheduler == "constant" else int(total * params.warmup_ratio)


def factor(scheduler: str, step: int, warmup: int, total: int) -> float:
    """What the rate of a step, counted from 0, is multiplied with.

    `linear` and `cosine` are transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup` (half a cycle), from which the first step has a rate of 0
    where there is a warm-up.
    """
    if scheduler == "none":
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    if scheduler == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total - warmup)
    if scheduler == "linear":
        return max(0.0, 1.0 - progress)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
