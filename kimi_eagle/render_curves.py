"""`show RUN --plot`: the curves of a run's trainings as text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.curves import SIMULATED, points, series
from kimi_eagle.follow import StageEvents
from kimi_eagle.identity import short
from kimi_eagle.plot import ASCII, Curve, Style, plot, style_for
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.search import LATEST, RUN, Search
from kimi_eagle.registry.store import Registry
from kimi_eagle.render import emit_json
from kimi_eagle.terminal import columns, paint

_ACCURACY = re.compile(r"(?:train|val)/full_acc_(\d+)")


@dataclass(frozen=True)
class Trained:
    """A training, and its curves by tag."""

    stage: str
    run_id: str
    """The run that executed it; an earlier one where it is reused."""
    curves: Mapping[str, Sequence[tuple[int, float]]]


def trained(root: Path, prefix: str) -> list[Trained]:
    """The trainings of a run, or the one that made a checkpoint, as far as they have come.

    Raises:
        RegistryError, UnknownDigest, AmbiguousDigest.
        LookupError: it names no training.
    """
    registry = Registry(root, create=False)
    try:
        search = Search(registry)
        if prefix == LATEST:
            digest, kind = search.run(prefix).id, RUN
        else:
            digest, kind = search.find(prefix)
        stages = registry.stages_of(digest) if kind == RUN else registry.producers(digest)[-1:]
        stages = [stage for stage in stages if stage.kind == "train"]
        found = [_trained(root, registry, stage) for stage in stages]
    finally:
        registry.close()
    if not found:
        raise LookupError(
            f"{kind} {short(digest)} has no training to plot: give a run with a stage of kind "
            "train, or a checkpoint"
        )
    return found


def _trained(root: Path, registry: Registry, stage: ExecutionRecord) -> Trained:
    made = stage if stage.reused_from is None else registry.execution(stage.reused_from)
    events = StageEvents(root, made.run_id, made.stage)
    return Trained(stage.stage, made.run_id, series(points(events.new())))


def plotted(root: Path, prefix: str, *, as_json: bool) -> None:
    """Print the curves that a run or a checkpoint has; raises as `trained` does."""
    found = trained(root, prefix)
    if as_json:
        emit_json(
            {
                "trainings": [
                    {"stage": item.stage, "run": item.run_id, "curves": item.curves}
                    for item in found
                ]
            }
        )
        return
    unshown = sys.stdout.isatty() and os.environ.get("TERM") == "linux"  # its font has no braille
    style = ASCII if unshown else style_for(sys.stdout.encoding)
    for number, item in enumerate(found):
        print(("\n" if number else "") + f"{item.stage} (run {item.run_id})")
        if not item.curves:
            print("no curves: it has reported nothing yet, or its events are not kept")
        for text in panels(item.curves, columns(), style):
            print(text.replace(style.mark, paint(style.mark, "warn", sys.stdout)))


def panels(
    curves: Mapping[str, Sequence[tuple[int, float]]], width: int, style: Style
) -> Iterator[str]:
    """The lines of the plots: loss, accuracy at each TTT step on one scale, the acceptance length
    that they give."""
    steps = sorted({int(found[1]) for tag in curves if (found := _ACCURACY.fullmatch(tag))})
    accuracies = [f"full_acc_{step}" for step in steps]
    top = max(
        (value for name in accuracies for curve in _both(curves, name) for _, value in curve),
        default=1.0,
    )
    shown = [("loss", 6, None, None), *((name, 3, 0.0, top or 1.0) for name in accuracies)]
    for name, height, low, high in [*shown, (SIMULATED, 5, None, None)]:
        line, marks = _both(curves, name)
        if line or marks:
            title = name.replace("_", " ") if name == SIMULATED else name
            yield from plot(
                title, line, marks, width=width, height=height, style=style, low=low, high=high
            )


def _both(curves: Mapping[str, Sequence[tuple[int, float]]], name: str) -> tuple[Curve, Curve]:
    return curves.get(f"train/{name}", ()), curves.get(f"val/{name}", ())
