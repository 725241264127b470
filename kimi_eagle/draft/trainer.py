"""speculators' trainer, also on a CPU, reporting as it goes. Imports torch and speculators.

speculators 0.9.0 assumes an accelerator in three places that matter here: the rank (0) doubles as
the device, autocast falls back to `cuda`, and the step timer synchronizes an accelerator. They are
set right here and nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from speculators.train import trainer as upstream
from speculators.train.checkpointer import convert_float_dtype

Report = Callable[[dict[str, Any]], None]


class _CpuTimer(upstream._StepTimer):  # type: ignore[misc]
    """The step timer without an accelerator to wait for."""

    def mark(self, name: str) -> None:
        if self.enabled:
            self._marks[name] = time.perf_counter()

    def now(self) -> float | None:
        return time.perf_counter() if self.enabled else None


class _MetricHandler(logging.Handler):
    """Hands speculators' metric records on."""

    def __init__(self, report: Report):
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            self._report(record.msg)


class DraftTrainer(upstream.Trainer):  # type: ignore[misc]
    """Trains, and keeps the weights of one epoch: the best by validation loss, or the last."""

    def __init__(self, *arguments: Any, keep: str, report: Report, **options: Any):
        self._keep = keep
        self.kept: dict[str, Any] | None = None
        self.kept_epoch = -1
        self.best_val_loss: float
        self.kept_metrics: dict[str, float] = {}
        metrics = logging.getLogger("speculators.metrics")
        metrics.setLevel(logging.INFO)
        metrics.propagate = False
        metrics.addHandler(_MetricHandler(report))
        if torch.accelerator.current_accelerator() is None:
            upstream._StepTimer = _CpuTimer
        super().__init__(*arguments, **options)

    def setup_trainer(self) -> None:
        if torch.accelerator.current_accelerator() is None:
            self.local_rank, self.device_type = "cpu", "cpu"
        super().setup_trainer()

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Nothing is written while training: one epoch is kept in memory (see below)."""

    def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        loss = (val_metrics or {}).get("loss_epoch")
        if self._keep == "best" and loss is not None:
            if loss >= self.best_val_loss:
                return
            self.best_val_loss = loss
        self.kept = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in convert_float_dtype(self.model.state_dict(), torch.bfloat16).items()
        }
        self.kept_epoch = epoch
        self.kept_metrics = dict(val_metrics or {})
