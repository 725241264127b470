"""The figures of a training, kept on its device until they are read. Imports torch.

Reading a figure makes a CPU wait for its GPU; so they are read for many steps at once, and no step
waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kimi_eagle.draft.losses import Tally


class Diverged(ArithmeticError):
    """A loss or gradient is not finite; the message says at which step, with which rows."""


class Impossible(ArithmeticError):
    """A figure is what it cannot be."""


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step."""

    step: int
    """From 1."""
    epoch: int
    """From 0."""
    values: Mapping[str, float]
    """`loss`, and for each TTT step k `loss_k`, `full_acc_k`, `cond_acc_k`; `grad_norm`."""
    tokens: int
    milliseconds: Mapping[str, float]
    """By phase: fetch (waiting for data), forward, backward, optimizer."""


class Clock:
    """What the phases of a step take: on a GPU as it comes to them, without waiting for it."""

    def __init__(self, device: Any):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: str) -> None:
        """A phase has just ended."""
        self._marks.append((phase, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """By phase; on a GPU only when it has come to the last."""
        found: dict[str, float] = {}
        for (_, before), (phase, after) in pairwise(self._marks):
            spent = before.elapsed_time(after) if self._cuda else (after - before) * 1000
            found[phase] = found.get(phase, 0.0) + spent
        return found


def add(one: Tally | None, other: Tally) -> Tally:
    """The tally of two batches."""
    if one is None:
        return other
    return Tally(one.loss + other.loss, one.correct + other.correct, one.chained + other.chained)


def values_of(
    loss: Sequence[float],
    correct: Sequence[float],
    chained: Sequence[float],
    totals: Sequence[int],
) -> dict[str, float]:
    """The named figures of sums over positions.

    `full_acc_k` is the share of the positions with a loss at step k where the steps 0 to k are all
    right; `cond_acc_k` that among those where the steps before are.

    Raises:
        Impossible: more were right than there are.
    """
    found = {"loss": math.fsum(loss)}
    for k, total in enumerate(totals):
        found[f"loss_{k}"] = loss[k]  # as it enters the whole: with its weight
        for name, of in (("full_acc", float(total)), ("cond_acc", chained[k])):
            if correct[k] > of:
                raise Impossible(
                    f"TTT step {k}: {correct[k]:.0f} of {of:.0f} positions right: the masks of "
                    "losses and accuracies are not the same"
                )
            found[f"{name}_{k}"] = correct[k] / of if of else 0.0
    return found


class Figures:
    """Collects the figures of steps, and reads them together."""

    def __init__(self, report: Callable[[StepFigures], None], every: int):
        self._report = report
        self._every = every
        self._waiting: list[tuple[int, int, Sequence[int], int, Clock, Any, Sequence[str]]] = []

    def add(
        self,
        step: int,
        epoch: int,
        totals: Sequence[int],
        tokens: int,
        clock: Clock,
        tally: Tally,
        norm: Any,
        rows: Sequence[str],
    ) -> None:
        """Take a step's figures; those of `every` steps are then read.

        Raises: see `read`.
        """
        figures = torch.cat([tally.loss, tally.correct, tally.chained, norm.reshape(1).float()])
        self._waiting.append((step, epoch, totals, tokens, clock, figures, rows))
        if len(self._waiting) >= self._every:
            self.read()

    def read(self) -> None:
        """Read and report what waits.

        Raises:
            Diverged, Impossible: at the first step that is not as it must be.
        """
        if not self._waiting:
            return
        table = torch.stack([item[5] for item in self._waiting]).tolist()
        waiting, self._waiting = self._waiting, []
        for (step, epoch, totals, tokens, clock, _, rows), line in zip(waiting, table, strict=True):
            steps = len(totals)
            norm = line[-1]
            losses = line[:steps]
            if not all(map(math.isfinite, [*losses, norm])):
                what = "gradient" if all(map(math.isfinite, losses)) else "loss"
                raise Diverged(
                    f"step {step} (epoch {epoch + 1}): the {what} is not finite (loss "
                    f"{math.fsum(losses)}, gradient norm {norm}); its rows: {', '.join(rows)}. "
                    "Nothing of this step was saved: lower the learning rate, or look at those "
                    "rows' states"
                )
            correct, chained = line[steps : 2 * steps], line[2 * steps : 3 * steps]
            values = {**values_of(losses, correct, chained, totals), "grad_norm": norm}
            self._report(StepFigures(step, epoch, values, tokens, clock.milliseconds()))
