"""The draft's head and losses, over supervised positions alone, in chunks. Imports torch.

The head is frozen, so all that training needs of it is the gradient with respect to its input.
That is computed with the loss, a chunk of positions at a time: logits and their gradient live for
one chunk, and no [positions, vocab] in fp32 exists, nor is any kept for the backward pass.

The sums are speculators' (`losses.utils.loss_function`, `models.eagle3.metrics`): at TTT step k
the mean over the positions whose target, k further on, is supervised, times decay^k; all steps
added up. Other than there, a position's target is always of its own row, and positions of all the
batches of an optimizer step weigh the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from kimi_eagle.draft.batches import PackedBatch
from kimi_eagle.draft.kernels import Kernels, by_autograd

# speculators adds this to every denominator.
_EPSILON = 1e-5
# Positions whose logits exist at once: 2048 · 32000 in bf16 are 131 MB.
CHUNK = 2048


@dataclass(frozen=True)
class Aims:
    """What the losses of a batch aim at."""

    logits: Any
    """[supervised, vocab] in the type of the products; None where only `tokens` count."""
    tokens: Any
    """int64 [supervised]: the verifier's most likely token, of the draft's vocabulary."""


@dataclass(frozen=True)
class Tally:
    """Sums over a batch, on its device: one figure for each TTT step, fp32 [steps]."""

    loss: Any
    """Of each step, as it enters the whole: its weight and share of the denominator in it."""
    correct: Any
    """Positions where the steps 0 to k are all right."""
    chained: Any
    """Positions where the steps 0 to k-1 are all right, and step k has a target."""


class Heads:
    """The verifier's norm and head, restricted to the draft's vocabulary, and the losses."""

    def __init__(
        self,
        model: Any,
        *,
        loss: str,
        decay: float,
        dtype: Any,
        kernels: Kernels,
        chunk: int = CHUNK,
    ):
        """Args: `loss`: one of the manifest's; `decay`: step k weighs this to the power of k."""
        self._loss = loss
        self._decay = decay
        self._dtype = dtype
        self._chunk = chunk
        self._model = model
        own = {"kl_div": kernels.kl, "ce": kernels.ce}
        self._chunk_loss = own[loss] if loss in own else by_autograd(loss)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def aims(self, batch: PackedBatch) -> Aims:
        """The verifier's logits at the supervised positions, once for all TTT steps."""
        norm, head = self._model.verifier_norm, self._model.verifier_lm_head.weight
        at = batch.starts[0]
        last = batch.last_states.index_select(0, at).to(self._dtype)
        weight = head.to(self._dtype)
        if self._loss != "ce":
            logits = linear(norm(last).to(self._dtype), weight)
            return Aims(logits, logits.argmax(-1))
        tokens = [
            linear(norm(part).to(self._dtype), weight).argmax(-1)
            for part in last.split(self._chunk)
        ]
        return Aims(None, torch.cat(tokens))

    def __call__(
        self, states: Sequence[Any], batch: PackedBatch, totals: Sequence[int]
    ) -> tuple[Any, Tally]:
        """The loss of a batch as a scalar, and its tally.

        Args:
            states: normed states of each TTT step, [positions, hidden].
            totals: positions with a loss at each TTT step, in all batches of the optimizer step.
        """
        aims = self.aims(batch)
        weight = self._model.lm_head.weight.to(self._dtype)
        right = batch.loss_mask
        terms, losses, corrects, chained = [], [], [], []
        for step, (hidden, at) in enumerate(zip(states, batch.starts, strict=True)):
            # On the device, where a compiled kernel takes it for any other of its kind.
            factor = self._decay**step / (totals[step] + _EPSILON)
            share = torch.full((), factor, device=hidden.device)
            numbers = batch.rank.index_select(0, at + step)
            term, tokens = _HeadLoss.apply(
                hidden.index_select(0, at), weight, aims, numbers, share, self
            )
            terms.append(term)
            losses.append(term.detach())
            # A position counts at step k if it was right at every step before.
            before = right.index_select(0, at)
            correct = before & (tokens == aims.tokens.index_select(0, numbers))
            chained.append(before.sum())
            corrects.append(correct.sum())
            right = torch.zeros_like(batch.loss_mask).index_copy(0, at, correct)
        tally = Tally(*(torch.stack(items).float() for items in (losses, corrects, chained)))
        return torch.stack(terms).sum(), tally

    def chunk_loss(self, logits: Any, aims: Aims, numbers: Any, share: Any) -> tuple[Any, Any, Any]:
        """Loss fp32 [rows], its gradient times `share` [rows, vocab], and the likeliest tokens."""
        targets = aims.tokens if self._loss == "ce" else aims.logits
        losses, slope, tokens = self._chunk_loss(logits, targets, numbers, share)
        return losses, slope, tokens

    @property
    def chunk(self) -> int:
        return self._chunk


class _HeadLoss(torch.autograd.Function):  # type: ignore[misc]
    """hidden → the sum of losses times their share; the gradient is made on the way forward."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Any,
        weight: Any,
        aims: Aims,
        numbers: Any,
        share: Any,
        heads: Heads,
    ) -> tuple[Any, Any]:
        gradient = torch.empty_like(hidden) if context.needs_input_grad[0] else None
        total = torch.zeros((), device=hidden.device)
        tokens = []
        for first in range(0, len(hidden), heads.chunk):
            window = slice(first, first + heads.chunk)
            logits = linear(hidden[window], weight)
            losses, slope, likeliest = heads.chunk_loss(logits, aims, numbers[window], share)
            total += losses.sum() * share
            tokens.append(likeliest)
            if gradient is not None:
                torch.mm(slope, weight, out=gradient[window])
        if gradient is not None:
            context.save_for_backward(gradient)
        found = torch.cat(tokens) if tokens else numbers
        context.mark_non_differentiable(found)
        return total, found

    @staticmethod
    def backward(context: Any, scale: Any, _: Any) -> tuple[Any, ...]:
        (gradient,) = context.saved_tensors
        return gradient * scale.to(gradient.dtype), None, None, None, None, None
