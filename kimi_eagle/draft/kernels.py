"""The arithmetic between the matrix products, compiled into single kernels on a GPU. Imports torch.

Every function here is pure, takes and gives tensors, and is correct uncompiled; `Kernels` holds
them as they are, or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu


def rms_norm(x: Any, weight: Any, eps: float, dtype: Any) -> Any:
    """Root mean square norm over the last axis, computed in fp32, given as `dtype`."""
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * x).to(dtype)


def add_and_norm(x: Any, added: Any, weight: Any, eps: float, dtype: Any) -> tuple[Any, Any]:
    """x + added, and `rms_norm` of it: one pass over memory, and one for both their gradients."""
    total = x + added
    return total, rms_norm(total, weight, eps, dtype)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of x [heads, positions, dim] by cos, sin fp32 [positions, dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def gated(gate: Any, up: Any) -> Any:
    """silu(gate) · up."""
    return silu(gate) * up


def with_diagonals(out: Any, lse: Any, query: Any, keys: Any, values: Any, scale: float) -> Any:
    """Attention over some keys, and one further key of a position's own from each TTT step.

    Softmax over a union is that over each part, weighed by their sums of exponentials.

    Args:
        out, lse: attention over the first keys [heads, positions, dim], and the log of the sum of
            its exponentials, fp32 [heads, positions].
        query: [heads, positions, dim].
        keys, values: [steps, heads, positions, dim].
    """
    own = (query.float().unsqueeze(0) * keys.float()).sum(-1) * scale
    most = torch.maximum(lse, own.amax(0))
    share, shares = torch.exp(lse - most), torch.exp(own - most)
    total = share + shares.sum(0)
    mixed = out.float() * share.unsqueeze(-1) + (values.float() * shares.unsqueeze(-1)).sum(0)
    return (mixed / total.unsqueeze(-1)).to(query.dtype)


def kl_and_gradient(logits: Any, targets: Any, numbers: Any, weight: Any) -> tuple[Any, Any, Any]:
    """KL(target ‖ draft) of each row and its gradient with respect to the logits.

    Args:
        logits: [rows, vocab] of any floating type; computed in fp32.
        targets: [positions, vocab], of which row i aims at number `numbers[i]`, int64 [rows].
        weight: fp32, no axes.

    Returns: loss fp32 [rows]; `weight` · (softmax(logits) - softmax(target)) as the logits'
        type; the most likely token of `logits`, int64 [rows].
    """
    x, y = logits.float(), targets.index_select(0, numbers).float()
    log_q, log_p = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    p = log_p.exp()
    # A target's share that underflows to 0 adds nothing, as 0 · log 0.
    loss = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    gradient = (log_q.exp() - p) * weight
    return loss, gradient.to(logits.dtype), logits.argmax(-1)


def ce_and_gradient(logits: Any, targets: Any, numbers: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Cross-entropy with one token each, as `kl_and_gradient`. `targets`: int64 [positions]."""
    x = logits.float()
    log_q = torch.log_softmax(x, -1)
    at = targets.index_select(0, numbers).unsqueeze(-1)
    loss = -log_q.gather(-1, at).squeeze(-1)
    one = torch.arange(x.shape[-1], device=x.device) == at
    gradient = (log_q.exp() - one.to(x.dtype)) * weight
    return loss, gradient.to(logits.dtype), logits.argmax(-1)


def by_autograd(name: str) -> Callable[..., Any]:
    """A loss of speculators' by its name, with its gradient, as `kl_and_gradient`."""
    from speculators.losses import resolve_loss_config

    ((loss, _),) = resolve_loss_config(name, "eager").values()

    def loss_and_gradient(
        logits: Any, targets: Any, numbers: Any, weight: Any
    ) -> tuple[Any, Any, Any]:
        aims = targets.index_select(0, numbers)
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            losses = loss(x.unsqueeze(0), aims.unsqueeze(0)).squeeze(0)
            (gradient,) = torch.autograd.grad((losses * weight).sum(), x)
        return losses.detach(), gradient, logits.argmax(-1)

    return loss_and_gradient


def made(function: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
    """A function as it is, or compiled."""
    return torch.compile(function, dynamic=None) if compiled else function


def _kl_kernel() -> Callable[..., Any]:
    from kimi_eagle.draft.kl_kernel import kl

    return kl


class Kernels:
    """The functions above, each compiled for a device where that is asked for."""

    def __init__(self, *, compiled: bool):
        self.compiled = compiled
        self.rms_norm = made(rms_norm, compiled=compiled)
        self.add_and_norm = made(add_and_norm, compiled=compiled)
        self.rotate = made(rotate, compiled=compiled)
        self.gated = made(gated, compiled=compiled)
        self.with_diagonals = made(with_diagonals, compiled=compiled)
        self.kl = _kl_kernel() if compiled else kl_and_gradient
        self.ce = made(ce_and_gradient, compiled=compiled)
