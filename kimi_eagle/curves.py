"""The events of a stage as points of curves: (step, {tag: value}). Pure.

Tags are `train/loss`, `train/loss_0`, `train/full_acc_0`, `train/lr`, `val/…`, `perf/…`: whatever a
stage reports as numbers. The step is the optimizer's, from 1; a validation is at the step before
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Point = tuple[int, dict[str, float]]

SIMULATED = "simulated_acceptance_length"
"""Tag of 1 + Σ full_acc_k, the acceptance length that the accuracies give: `full_acc_k` is the
share of positions where the TTT steps 0 to k are all right."""

_SPLITS = ("train", "val")
# What an event says besides its figures.
_PLACE = ("event", "split", "step", "values")
_OF_TRAINING = ("lr", "epoch")


class Curves:
    """Turns the events of one stage into points, in the order they come."""

    def __init__(self) -> None:
        self.step = 0
        """The last optimizer step that was reported."""

    def point(self, event: Mapping[str, Any]) -> Point | None:
        """The point that an event adds; None for an event without figures."""
        split = event.get("split")
        if event.get("event") != "metric" or split not in _SPLITS:
            return None
        step = event.get("step")
        if isinstance(step, int):
            self.step = step
        elif split == "val" and not self.step and isinstance(event.get("epoch"), int):
            self.step = event["epoch"] + 1  # no training step was reported
        values: dict[str, float] = {}
        reported = event.get("values")
        for name, value in _numbers(reported if isinstance(reported, Mapping) else {}):
            values[f"{split}/{name.removesuffix('_epoch')}"] = value
        for field, value in event.items():
            if field in _PLACE:
                continue
            group = split if field in _OF_TRAINING else "perf"
            for name, number in _numbers({field: value}):
                values[f"{group}/{name}"] = number
        simulated = simulated_length(values, split)
        if simulated is not None:
            values[f"{split}/{SIMULATED}"] = simulated
        return self.step, values


def simulated_length(values: Mapping[str, float], split: str) -> float | None:
    """1 + Σ full_acc_k of a split, in draft tokens and the bonus token; None without any.

    Source: expected tokens a step, as accuracies at step k count only where all before were right.
    """
    accuracies: list[float] = []
    while (value := values.get(f"{split}/full_acc_{len(accuracies)}")) is not None:
        accuracies.append(value)
    return 1 + math.fsum(accuracies) if accuracies else None


def points(events: Iterable[Mapping[str, Any]]) -> list[Point]:
    """All points of a stage's events."""
    curves = Curves()
    found = (curves.point(event) for event in events)
    return [point for point in found if point is not None]


def series(found: Iterable[Point]) -> dict[str, list[tuple[int, float]]]:
    """Points by tag: each a curve of (step, value)."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, values in found:
        for tag, value in values.items():
            curves.setdefault(tag, []).append((step, value))
    return curves


def figures(metrics: Mapping[str, Any], group: str) -> dict[str, float]:
    """The numbers among a stage's metrics, by tag."""
    return {f"{group}/{name}": value for name, value in _numbers(metrics)}


def _numbers(values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Finite numbers, those in a mapping after its name: no tag is another's folder."""
    for name, value in values.items():
        # Numbers first: a long training has hundreds of thousands of them.
        if isinstance(value, (int, float)):
            if math.isfinite(value) and not isinstance(value, bool):
                yield name, float(value)
        elif isinstance(value, Mapping):
            yield from ((f"{name}_{inner}", number) for inner, number in _numbers(value))
