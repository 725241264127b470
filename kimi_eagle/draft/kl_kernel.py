"""KL divergence of rows of logits, and its gradient, in two passes over memory. Imports triton.

A row's target is read where it lies, so that no [rows, vocab] of targets is gathered first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Tokens that are read at once.
_BLOCK = 4096


def kl(logits: Any, targets: Any, numbers: Any, weight: Any) -> tuple[Any, Any, Any]:
    """As `kernels.kl_and_gradient`; all contiguous."""
    rows, vocab = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    gradient = torch.empty_like(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _kernel[(rows,)](
            logits,
            targets,
            numbers,
            weight,
            loss,
            gradient,
            tokens,
            vocab,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return loss, gradient, tokens


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits, targets, numbers, weight, loss, gradient, tokens, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_row = logits + row * vocab
    y_row = targets + tl.load(numbers + row).to(tl.int64) * vocab
    lane = tl.arange(0, BLOCK)
    # Of each lane: the most so far, and the sum of exponentials beside it. Far less than any
    # logit, and finite: a lane without a token comes out as nothing.
    least = -1.0e30
    x_most = tl.full((BLOCK,), least, tl.float32)
    y_most = tl.full((BLOCK,), least, tl.float32)
    x_sum = tl.zeros((BLOCK,), tl.float32)
    y_sum = tl.zeros((BLOCK,), tl.float32)
    likeliest = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + lane
        x = tl.load(x_row + at, mask=at < vocab, other=least).to(tl.float32)
        y = tl.load(y_row + at, mask=at < vocab, other=least).to(tl.float32)
        likeliest = tl.where(x > x_most, at, likeliest)
        x_new, y_new = tl.maximum(x_most, x), tl.maximum(y_most, y)
        x_sum = x_sum * tl.exp(x_most - x_new) + tl.exp(x - x_new)
        y_sum = y_sum * tl.exp(y_most - y_new) + tl.exp(y - y_new)
        x_most, y_most = x_new, y_new
    x_top, y_top = tl.max(x_most), tl.max(y_most)
    log_x = x_top + tl.log(tl.sum(x_sum * tl.exp(x_most - x_top)))
    log_y = y_top + tl.log(tl.sum(y_sum * tl.exp(y_most - y_top)))
    found = tl.min(tl.where(x_most == x_top, likeliest, vocab))
    share = tl.load(weight)
    losses = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + lane
        inside = at < vocab
        log_q = tl.load(x_row + at, mask=inside, other=least).to(tl.float32) - log_x
        log_p = tl.load(y_row + at, mask=inside, other=least).to(tl.float32) - log_y
        p = tl.exp(log_p)
        # A target's share that underflows to 0 adds nothing, as 0 · log 0.
        losses += tl.where(p > 0, p * (log_p - log_q), 0.0)
        slope = (tl.exp(log_q) - p) * share
        tl.store(gradient + row * vocab + at, slope.to(gradient.dtype.element_ty), mask=inside)
    tl.store(loss + row, tl.sum(losses))
    tl.store(tokens + row, found.to(tl.int64))
