"""Muon: momentum, orthogonalized (Jordan et al. 2024; Liu et al. 2025). Imports torch.

It is torch's `Muon` with `match_rms_adamw`, computed otherwise. Newton-Schulz iterates
x ← (a·1 + b·g + c·g²)·x with g = x·xᵀ. All that is multiplied from the left is a polynomial in g:
symmetric, and as small as the shorter side of x. So the polynomials of some steps are multiplied
first, and x by their product. That is done in fp16, which has three bits more than the bf16 of
torch's: what comes out is closer to the same iteration in fp64 (by a factor of 2 for a square
matrix of noise, of 8 for an oblong one). A factor on x keeps its numbers and those of g in the
middle of what fp16 can say.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kimi_eagle.draft.kernels import made

# torch's coefficients.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
# x is as many times its norm; g is at most 1.5 · 128² then, and fp16 ends at 65504.
SCALE = 128.0
# Steps between two computations of g from x, as errors of g grow with each.
_STEPS_OF_GRAM = 3


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Momentum, orthogonalized; the update has the root mean square of AdamW's (0.2)."""

    def __init__(self, parameters: list[Any], params: Any, *, compiled: bool):
        super().__init__(parameters, {"lr": params.muon_lr})
        self._momentum = params.muon_momentum
        self._decay = params.muon_weight_decay
        self._steps = params.muon_steps
        self._compiled = compiled
        self._advance = made(advance, compiled=compiled)
        self._nesterov = made(nesterov, compiled=compiled)
        self._apply = made(apply, compiled=compiled)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                squares = self._advance(gradient, buffer, self._momentum)
                scale = SCALE / squares.sum().sqrt().clamp(min=_EPS)
                dtype = torch.float16 if parameter.is_cuda else torch.float32
                x = self._nesterov(gradient, buffer, scale, self._momentum, dtype)
                x = orthogonal(x, self._steps, compiled=self._compiled)
                ratio = 0.2 * math.sqrt(max(parameter.shape))
                keep, rate = (
                    torch.full((), value, device=parameter.device)
                    for value in (1 - group["lr"] * self._decay, -group["lr"] * ratio / SCALE)
                )
                self._apply(parameter, x, keep, rate)


def advance(gradient: Any, buffer: Any, momentum: float) -> Any:
    """Take a gradient into the momentum; returns the sums of squares of each row of Nesterov's
    update, fp32. (Row by row: a sum over everything would come out by the number of threads.)"""
    buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp(buffer, momentum).square().sum(1)


def nesterov(gradient: Any, buffer: Any, scale: Any, momentum: float, dtype: Any) -> Any:
    """Nesterov's update times `scale` (fp32, no axes)."""
    return (gradient.lerp(buffer, momentum) * scale).to(dtype)


def apply(parameter: Any, update: Any, keep: Any, rate: Any) -> None:
    """parameter ← keep · parameter + rate · update."""
    parameter.copy_(parameter * keep + update.float() * rate)


def orthogonal(x: Any, steps: int, *, compiled: bool) -> Any:
    """`SCALE` times the nearest semi-orthogonal matrix, roughly.

    Args:
        x: [rows, columns] of norm `SCALE`: fp16 on a GPU, fp32 on a CPU.
        compiled: symmetric products by half, where the kernel takes them.
    """
    tall = x.shape[0] > x.shape[1]
    while steps:
        now = steps % _STEPS_OF_GRAM or _STEPS_OF_GRAM
        turned = x.T if tall else x
        total = _polynomial(_symmetric(turned, turned, compiled=compiled), now, compiled)
        x = x @ total if tall else total @ x
        steps -= now
    return x


def _polynomial(gram: Any, steps: int, compiled: bool) -> Any:
    """What some steps of Newton-Schulz multiply x by, of its `gram`, `SCALE`² times its own."""
    total: Any = None
    for step in range(steps):
        factor = _symmetric(
            gram,
            gram,
            alpha=_C / SCALE**4,
            beta=_B / SCALE**2,
            added=gram,
            diagonal=_A,
            compiled=compiled,
        )
        total = factor if total is None else _symmetric(factor, total, compiled=compiled)
        if step + 1 < steps:
            half = _symmetric(factor, gram, compiled=compiled)
            gram = _symmetric(half, factor, compiled=compiled)
    return total


def _symmetric(
    left: Any,
    right: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    added: Any = None,
    diagonal: float = 0.0,
    compiled: bool,
) -> Any:
    """alpha · left · rightᵀ + beta · added + diagonal · 1, known to be symmetric."""
    if compiled:
        from kimi_eagle.draft import symmetric_kernel

        if symmetric_kernel.fits(*left.shape):
            return symmetric_kernel.product(
                left, right, alpha=alpha, beta=beta, added=added, diagonal=diagonal
            )
    if added is None:
        return left @ right.T
    found = torch.addmm(added, left, right.T, beta=beta, alpha=alpha)
    found.diagonal().add_(diagonal)
    return found
