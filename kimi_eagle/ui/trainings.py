"""The curves of a training as people look at them: by chart, with what came to no number, and with
what an earlier run had done where it was resumed.

Everything that is told of a curve is of all its points; only what is drawn is thinned out (see
`chart`).
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from kimi_eagle.curves import SIMULATED, Curves
from kimi_eagle.follow import StageEvents
from kimi_eagle.job import EVENTS
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.browse import resumed_from
from kimi_eagle.registry.store import Registry

# A training that was resumed again and again: so many of its runs are joined.
_MOST_RESUMED = 32
_KEPT = 8
_STEP = re.compile(r"(loss|full_acc)_(\d+)")
_CHARTED = re.compile(
    r"(train|val)/((loss|full_acc)(_\d+)?|" + SIMULATED + r")"
    r"|train/(lr(_\w+)?|grad_norm)|perf/tokens_per_second"
)


@dataclass
class Series:
    """A curve: values over optimizer steps, which rise. NaN where a value was no finite number."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Places in the two lists where the value is NaN."""

    def add(self, step: int, value: float | None) -> None:
        """Append a point; what was done again, after a resume, stands for what was done before."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
            if self.lost and self.lost[-1] == len(self.steps):
                self.lost.pop()
        if value is None:
            self.lost.append(len(self.steps))
        self.steps.append(step)
        self.values.append(math.nan if value is None else value)

    def joined(self, later: Series | None, step: int) -> Series:
        """This up to a step, and what another has after it."""
        found = Series()
        for part, start, end in ((self, None, step), (later or Series(), step, None)):
            first = 0 if start is None else bisect_right(part.steps, start)
            last = len(part.steps) if end is None else bisect_right(part.steps, end)
            shift = len(found.steps) - first
            found.lost += [place + shift for place in part.lost if first <= place < last]
            found.steps += part.steps[first:last]
            found.values += part.values[first:last]
        return found

    def copy(self) -> Series:
        return Series(list(self.steps), list(self.values), list(self.lost))

    def numbers(self) -> tuple[list[int], list[float]]:
        """Steps and values without what is no number."""
        if not self.lost:
            return self.steps, self.values
        places = [at for at, value in enumerate(self.values) if value == value]
        return [self.steps[at] for at in places], [self.values[at] for at in places]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    label: str
    tag: str
    series: Series
    marked: bool = False
    """Whether its points are single marks, as of validations."""
    look: int = 0
    """Lines and marks of one look belong together: training and validation of one TTT step."""

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Figures of all its points. It has one number at least."""
        steps, values = self.series.numbers()
        low, high = min(values), max(values)
        return {
            "label": self.label,
            "tag": self.tag,
            "points": len(self.series.steps),
            "not_finite": len(self.series.lost),
            "last": {"step": steps[-1], "value": values[-1]},
            "lowest": {"step": steps[values.index(low)], "value": low},
            "highest": {"step": steps[values.index(high)], "value": high},
        }


@dataclass(frozen=True)
class Chart:
    """Curves on one pair of axes."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]

    def rows(self, after: int = -1, most: int | None = None) -> list[list[Any]]:
        """All its points as a table, a row for each step: those after a step, so many at most."""
        columns = []
        for line in self.lines:
            first = bisect_right(line.series.steps, after)
            last = None if most is None else first + most
            found = zip(line.series.steps[first:last], line.series.values[first:last], strict=True)
            columns.append(dict(found))
        steps = sorted(set().union(*columns))[:most]
        return [[step, *(_told(column.get(step)) for column in columns)] for step in steps]

    def header(self) -> list[str]:
        return ["step", *(line.tag for line in self.lines)]


def _told(value: float | None) -> float | str | None:
    return "NaN" if value is not None and value != value else value


@dataclass(frozen=True)
class Training:
    """A training of a run, with the curves that it has so far."""

    stage: str
    run_id: str
    """The run that executed it; an earlier one where it is reused."""
    disposition: str
    charts: tuple[Chart, ...]
    resumed: tuple[int, ...] = ()
    """The steps after which it went on from a saved checkpoint."""
    diverged: bool = False
    """Whether it has reported, and nothing of it was a number."""

    def chart(self, name: str) -> Chart | None:
        return next((chart for chart in self.charts if chart.name == name), None)


@dataclass
class _Read:
    """What was read of one file of events so far."""

    events: StageEvents
    attempt: Path | None = None
    """The staging folder that it was in while the stage ran."""
    curves: Curves = field(default_factory=Curves)
    found: dict[str, Series] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


class TrainingReader:
    """Reads the curves of trainings; of the last few, what was read is kept and only gone on
    with."""

    def __init__(self, root: Path):
        self._root = root
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str], _Read] = OrderedDict()

    def training(self, registry: Registry, stage: ExecutionRecord) -> Training:
        """A training of a run, by the record of its stage."""
        made = stage if stage.reused_from is None else registry.execution(stage.reused_from)
        found = self._series(made.run_id, made.stage)
        resumed: list[int] = []
        at: int | None = made.id
        while at is not None and len(resumed) < _MOST_RESUMED:
            earlier = resumed_from(registry, at)
            if earlier is None:
                break
            before = self._series(earlier.run_id, earlier.stage)
            found = {
                tag: before.get(tag, Series()).joined(found.get(tag), earlier.step)
                for tag in dict.fromkeys([*before, *found])
            }
            resumed.append(earlier.step)
            at = earlier.execution
        shown = charts(found)
        return Training(
            stage.stage,
            made.run_id,
            stage.disposition,
            shown,
            tuple(sorted(resumed)),
            bool(found) and not shown,
        )

    def _series(self, run_id: str, stage: str) -> dict[str, Series]:
        key = (run_id, stage)
        with self._lock:
            read = self._kept.pop(key, None) or _Read(StageEvents(self._root, run_id, stage))
            self._kept[key] = read
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        with read.lock:
            place = read.events.place
            attempt = place.parent if place.name == EVENTS else read.attempt
            if attempt != (read.attempt or attempt) or _size(place) < read.events.offset:
                # Another attempt has begun: what the one before it reported is not of this.
                read.events = StageEvents(self._root, run_id, stage)
                read.curves, read.found = Curves(), {}
            read.attempt = attempt
            for event in _figures(read.events):
                _take(read, event)
            return {tag: series.copy() for tag, series in read.found.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _figures(events: StageEvents) -> Iterator[dict[str, Any]]:
    """The new events with figures; others are skipped unparsed, and so is what is damaged, which
    is for `verify` to tell of."""
    try:
        lines = events.lines()
    except OSError:
        return
    for line in lines:
        if b'"metric"' in line:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event


def _take(read: _Read, event: Mapping[str, Any]) -> None:
    point = read.curves.point(event)
    if point is None:
        return
    step, values = point
    split, reported = event["split"], event.get("values")
    # A worker writes null for what JSON has no number for: a loss that diverged.
    names = reported.items() if isinstance(reported, Mapping) else ()
    lost = [f"{split}/{str(n).removesuffix('_epoch')}" for n, value in names if value is None]
    if any("/full_acc_" in tag for tag in lost):
        values.pop(f"{split}/{SIMULATED}", None)
        lost.append(f"{split}/{SIMULATED}")
    for tag, value in [*values.items(), *((tag, None) for tag in lost)]:
        series = read.found.get(tag)
        if series is None:
            if not _CHARTED.fullmatch(tag):
                continue  # a training reports more than is drawn
            series = read.found[tag] = Series()
        series.add(step, value)


def charts(found: Mapping[str, Series]) -> tuple[Chart, ...]:
    """Curves by tag as small charts: one line per TTT step where there are several."""
    steps = sorted({int(m[2]) for tag in found if (m := _STEP.fullmatch(tag.partition("/")[2]))})

    def per_step(name: str, split: str = "train") -> list[tuple[str, str, int]]:
        told = "" if split == "train" else ", validation"
        return [(f"step {k}{told}", f"{split}/{name}_{k}", k) for k in steps]

    def both(name: str) -> list[tuple[str, str, int]]:
        return [("training", f"train/{name}", 0), ("validation", f"val/{name}", 1)]

    rates = sorted(tag for tag in found if re.fullmatch(r"train/lr(_\w+)?", tag))
    wanted: list[tuple[str, str, str, Sequence[tuple[str, str, int]]]] = [
        ("loss", "Loss", "", both("loss")),
        ("loss-per-step", "Loss per TTT step", "", per_step("loss")),
        (
            "accuracy",
            "Accuracy per TTT step (full_acc)",
            "",
            [*per_step("full_acc"), *per_step("full_acc", "val")],
        ),
        (
            "simulated",
            "Acceptance length that the accuracies give (simulated)",
            "1 + Σ full_acc_k",
            both(SIMULATED),
        ),
        (
            "lr",
            "Learning rate",
            "",
            [(tag.partition("/")[2], tag, look) for look, tag in enumerate(rates)],
        ),
        ("grad-norm", "Gradient norm, before clipping", "", [("norm", "train/grad_norm", 0)]),
        ("throughput", "Throughput", "tokens/s", [("training", "perf/tokens_per_second", 0)]),
    ]
    made = []
    for name, title, unit, tags in wanted:
        lines = tuple(
            Line(label, tag, found[tag], tag.startswith("val/"), look)
            for label, tag, look in tags
            if tag in found and len(found[tag].lost) < len(found[tag].steps)
        )
        if lines:
            made.append(Chart(name, title, unit, lines))
    return tuple(made)


def spark(root: Path, run_id: str, stage: str, places: int = 24) -> list[float]:
    """A few losses along a training, for a line that shows its shape and nothing else: read at
    equal distances in its file, whatever its size."""
    path = StageEvents(root, run_id, stage).place
    found: list[float] = []
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            for place in range(places):
                file.seek(size * place // places)
                block = file.read(2048).split(b"\n")
                for line in block[0 if place == 0 else 1 : -1]:
                    value = _loss(line)
                    if value is not None:
                        found.append(value)
                        break
    except OSError:
        return []
    return found


def _loss(line: bytes) -> float | None:
    if b'"train"' not in line:
        return None
    try:
        value = json.loads(line)["values"]["loss"]
    except (ValueError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) else None
