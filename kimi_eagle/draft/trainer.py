"""The training loop: exact, resumable, and without waiting for the device. Imports torch.

A training is a function of its parameters, rows, states and start. Where it stands is a step
number and what `snapshot` writes; going on from there takes the steps that an unbroken training
would have taken, to the bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kimi_eagle.draft.batches import Loader, Wanted, ahead, on_device
from kimi_eagle.draft.compute import Compute
from kimi_eagle.draft.figures import Clock, Figures, Impossible, StepFigures, add, values_of
from kimi_eagle.draft.losses import Tally
from kimi_eagle.draft.model import as_served, checkpoint_weights, copy_into, trained
from kimi_eagle.draft.optimizers import Optimizer, clip, owners
from kimi_eagle.draft.packing import Item, Step, step, steps_of
from kimi_eagle.draft.schedule import factor, warmup_of
from kimi_eagle.draft.snapshot import Progress, Snapshot, restore_generators, write
from kimi_eagle.stages.train.spec import TrainParams


class Peers(Protocol):
    """The processes that share the work of a step."""

    rank: int
    size: int

    def add_up(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor, in place, by its sum over all processes."""
        ...

    def to_owners(self, tensors: Sequence[Any], owners: Sequence[int]) -> None:
        """Replace each tensor, in place and at its owner alone, by its sum over all processes."""
        ...

    def from_owners(self, tensors: Sequence[Any], owners: Sequence[int]) -> None:
        """Replace each tensor, in place, by its owner's."""
        ...

    def gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of all processes, at the first; nothing elsewhere."""
        ...

    def agreed(self, said: bool) -> bool:
        """What the first process says."""
        ...


class Alone:
    """One process does it all."""

    rank, size = 0, 1

    def add_up(self, tensors: Sequence[Any]) -> None:
        """There is nothing to add."""

    def to_owners(self, tensors: Sequence[Any], owners: Sequence[int]) -> None:
        """All are its own."""

    def from_owners(self, tensors: Sequence[Any], owners: Sequence[int]) -> None:
        """All are its own."""

    def gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return dict(tensors)

    def agreed(self, said: bool) -> bool:
        return said


@dataclass(frozen=True)
class Data:
    """Rows to train on, or to validate on."""

    items: Sequence[Item]
    loader: Loader


class Stopped(Exception):
    """Asked to stop; what was done is saved."""


class Trainer:
    """Trains a draft from where it stands to its last epoch."""

    def __init__(
        self,
        model: Any,
        params: TrainParams,
        train: Data,
        validate: Data | None,
        *,
        compute: Compute,
        device: Any,
        peers: Peers | None = None,
        report: Callable[[StepFigures, dict[str, float]], None],
        report_validation: Callable[[int, dict[str, float]], None] = lambda _epoch, _values: None,
        snapshots: Path | None = None,
        announce: Callable[[str, Progress], None] = lambda _name, _progress: None,
        stopping: Callable[[], bool] = lambda: False,
    ):
        """
        Args:
            report: is given each step's figures and learning rates.
            snapshots: where to save; None saves nothing.
            announce: is called with the name of each snapshot that has been saved.
            stopping: whether to save and stop after the present step.
        """
        self._model = model
        self._params = params
        self._train = train
        self._validate = validate
        self._unroll = compute.unroll
        self._heads = compute.heads
        self._device = device
        self._peers = peers or Alone()
        self._report = report
        self._report_validation = report_validation
        self._snapshots = snapshots
        self._announce = announce
        self._stopping = stopping
        self._parameters = trained(model)
        self._owners = owners(self._parameters, params, self._peers.size)
        self._optimizer = Optimizer(
            self._parameters,
            params,
            compiled=compute.compiled,
            others={name for name, rank in self._owners.items() if rank != self._peers.rank},
        )
        self._progress = Progress()
        self._kept: dict[str, Any] | None = None
        self._saved: int | None = None
        self._saved_at = time.monotonic()
        self._figures = Figures(self._tell, params.log_steps if device.type == "cuda" else 1)
        self._epochs: dict[int, list[Step]] = {}
        self.total = sum(len(self.steps_of(epoch)) for epoch in range(params.epochs))
        self._warmup = warmup_of(params, self.total)
        self.steps_run = 0
        self.tokens_run = 0

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def kept(self) -> dict[str, Any]:
        """The trained weights that are kept, bf16; empty before there are any."""
        return self._kept or {}

    def checkpoint(self) -> dict[str, Any]:
        """All weights of what becomes the stage's checkpoint."""
        return checkpoint_weights(self._model, self.kept)

    def steps_of(self, epoch: int) -> list[Step]:
        """The optimizer steps of an epoch; every row is in one of them."""
        if epoch not in self._epochs:
            params = self._params
            self._epochs[epoch] = steps_of(
                self._train.items, params.batch_tokens, params.accumulate, params.seed, epoch
            )
        return self._epochs[epoch]

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot.

        Raises:
            BadStart, ValueError: it is of another draft or optimizer.
        """
        copy_into(self._parameters, snapshot.model, "the snapshot")
        self._optimizer.restore(snapshot.optimizer)
        restore_generators(snapshot.rng)
        self._kept = snapshot.kept
        self._progress = snapshot.progress
        self._saved = snapshot.progress.step

    def run(self) -> None:
        """Train to the last epoch.

        Raises:
            Diverged, Impossible: a figure is not as it must be; nothing of it is saved.
            Stopped: asked to, after saving.
        """
        self._model.train()
        while self._progress.epoch < self._params.epochs:
            self._epoch()
        if self._kept is None:  # nothing was validated, or the last epoch is asked for
            self._kept = self._weights()
            now = self._progress
            self._progress = replace(now, kept=now.validation, kept_epoch=now.epoch)

    def _epoch(self) -> None:
        epoch = self._progress.epoch
        left = self.steps_of(epoch)[self._progress.cursor :]
        own = [self._own(item) for item in left]
        wanted: list[Wanted] = [(batch, epoch) for batches in own for batch in batches]
        with ahead(self._train.loader, wanted, self._params.loader_workers) as read:
            batches = on_device(read, self._device)
            for item, mine in zip(left, own, strict=True):
                self._step(item, len(mine), batches)
                self._progress = replace(
                    self._progress,
                    step=self._progress.step + 1,
                    cursor=self._progress.cursor + 1,
                )
                if item is not left[-1]:
                    self._save_if_due()
        self._figures.read()
        validation = self._validation()
        self._progress = replace(self._progress, epoch=epoch + 1, cursor=0, validation=validation)
        if validation is not None:
            self._report_validation(epoch, validation)
        self._keep(validation)
        self.save()
        self._epochs.pop(epoch, None)
        if self._stopping() and self._progress.epoch < self._params.epochs:
            raise Stopped

    def _own(self, item: Step) -> tuple[tuple[int, ...], ...]:
        """The batches of a step that are this process's."""
        return item.batches[self._peers.rank :: self._peers.size]

    def _step(self, item: Step, count: int, batches: Any) -> None:
        clock = Clock(self._device)
        tally: Tally | None = None
        tokens = 0
        for _ in range(count):
            batch = next(batches)
            clock.mark("fetch")
            loss, part = self._heads(self._unroll(batch), batch, item.supervised)
            clock.mark("forward")
            loss.backward()
            clock.mark("backward")
            tally = add(tally, part)
            tokens += batch.tokens
        tally = self._shared(tally)
        norm = clip(self._parameters, self._params.clip_grad_norm, self._peers.add_up)
        rate = self.rate(self._progress.step)
        self._optimizer.step(rate)
        self._peers.from_owners(*self._owned(lambda item: item.data))
        clock.mark("optimizer")
        self.steps_run += 1
        self.tokens_run += tokens
        self._figures.add(
            self._progress.step + 1,
            item.epoch,
            item.supervised,
            sum(self._train.items[number].positions for number in item.rows()),
            clock,
            tally,
            norm,
            [self._train.items[number].key[:12] for number in item.rows()],
        )

    def _shared(self, tally: Tally | None) -> Tally:
        """The tally, summed over the processes, as gradients are at their owners; one without a
        batch adds nothing."""
        peers = self._peers
        if tally is None:
            zeros = torch.zeros(self._params.ttt_steps, device=self._device)
            tally = Tally(zeros, zeros.clone(), zeros.clone())
        if peers.size > 1:
            for parameter in self._parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            peers.to_owners(*self._owned(lambda item: item.grad))
            for name, parameter in self._parameters.items():
                if self._owners[name] != peers.rank:
                    parameter.grad = None
            peers.add_up([tally.loss, tally.correct, tally.chained])
        return tally

    def _owned(self, part: Callable[[Any], Any]) -> tuple[list[Any], list[int]]:
        """A part of every parameter, and the process that it belongs to."""
        found = [(part(item), self._owners[name]) for name, item in self._parameters.items()]
        return [item for item, _ in found], [owner for _, owner in found]

    def rate(self, number: int) -> float:
        """The factor on the learning rates of a step, counted from 0."""
        return factor(self._params.scheduler, number, self._warmup, self.total)

    def _tell(self, figures: StepFigures) -> None:
        self._report(figures, self._optimizer.rates(self.rate(figures.step - 1)))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _validation(self) -> dict[str, float] | None:
        """Figures over all validation rows: means over positions, however they are packed.

        Raises: Impossible.
        """
        if self._validate is None:
            return None
        params, items = self._params, self._validate.items
        (whole,) = _all(items, params)
        own = self._own(whole)
        tally: Tally | None = None
        with ahead(self._validate.loader, [(b, 0) for b in own], params.loader_workers) as read:
            for batch in on_device(read, self._device):
                _, part = self._heads(self._unroll(batch), batch, whole.supervised)
                tally = add(tally, part)
        if tally is None:
            zeros = torch.zeros(params.ttt_steps, device=self._device)
            tally = Tally(zeros, zeros.clone(), zeros.clone())
        self._peers.add_up([tally.loss, tally.correct, tally.chained])
        loss, correct, chained = (
            part.tolist() for part in (tally.loss, tally.correct, tally.chained)
        )
        if not all(map(math.isfinite, loss)):
            raise Impossible(f"epoch {self._progress.epoch + 1}: the validation loss is not finite")
        return values_of(loss, correct, chained, whole.supervised)

    def _keep(self, validation: dict[str, float] | None) -> None:
        """Keep the weights as they are now, if they are the best and that is asked for."""
        best = self._progress.best_loss
        if validation is None or not self._params.retention.best:
            return
        if best is not None and validation["loss"] >= best:
            return
        epoch = self._progress.epoch
        self._kept = self._weights()
        self._progress = replace(
            self._progress, best_loss=validation["loss"], kept=validation, kept_epoch=epoch
        )

    def _weights(self) -> dict[str, Any]:
        """The trained weights as they are now; the first process holds them."""
        return as_served(self._parameters) if self._peers.rank == 0 else {}

    def _save_if_due(self) -> None:
        params = self._params
        due = params.save_steps is not None and self._progress.step % params.save_steps == 0
        if params.save_minutes is not None:
            due |= time.monotonic() - self._saved_at > params.save_minutes * 60
        due = self._peers.agreed(due)  # their clocks differ
        stopping = self._stopping()
        if due or stopping:
            self._figures.read()
            self.save()
        if stopping:
            raise Stopped

    def save(self) -> None:
        """Save a snapshot of where the training stands: the first process does, with what all
        have of it."""
        if self._snapshots is None:
            return
        name = str(self._progress.step)
        at_end = self._progress.cursor == 0
        progress = replace(self._progress, parent=self._saved)
        if self._saved == self._progress.step and not at_end:
            return
        state = self._peers.gathered(self._optimizer.state())
        self._saved = self._progress.step
        self._saved_at = time.monotonic()
        if self._peers.rank == 0:
            write(self._snapshots / name, progress, self._parameters, state, self._kept)
            self._announce(name, progress)


def _all(items: Sequence[Item], params: TrainParams) -> list[Step]:
    """All validation batches, as one step."""
    steps = steps_of(items, params.batch_tokens, 1, params.seed, 0)
    return [step(items, 0, [batch for item in steps for batch in item.batches])]
