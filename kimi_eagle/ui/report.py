"""`kimi-eagle report`: a run with its stages, curves, acceptance and lineage as one HTML file, that
needs neither a server nor a script."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle import environments
from kimi_eagle.artifacts.files import write_text
from kimi_eagle.coordinator import as_it_is
from kimi_eagle.evaluations import table
from kimi_eagle.records import RunRecord
from kimi_eagle.registry.neighbourhood import UP, around
from kimi_eagle.registry.reading import ReadRegistry, told_apart
from kimi_eagle.registry.schema import FILE
from kimi_eagle.registry.search import Search
from kimi_eagle.ui import graph, templating
from kimi_eagle.ui.layers import layers
from kimi_eagle.ui.trainings import TrainingReader
from kimi_eagle.ui.view import Asked, View
from kimi_eagle.ui.views import curves, run
from kimi_eagle.ui.views.acceptance import held_together

_STAGES, _TRAININGS, _DEPTH = 2000, 12, 8
# Of these the lineage is shown, of the first that the run has; else of the last that it made.
_ENDS = ("release", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Written:
    run_id: str
    bytes: int


def write(root: Path, prefix: str, path: Path) -> Written:
    """Write the report of a run; whole or not at all.

    Raises: RegistryError, UnknownDigest, AmbiguousDigest, OSError.
    """
    registry = ReadRegistry(root)
    try:
        with told_apart(root / FILE):
            found = as_it_is(root, Search(registry).run(prefix), registry.run)
            text = templating.html(_view(root, registry, found), path="", report=True)
    finally:
        registry.close()
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "there is no such folder", str(path.parent))
    write_text(path, text)
    return Written(found.id, len(text.encode("utf-8")))


def _view(root: Path, registry: ReadRegistry, found: RunRecord) -> View:
    asked = Asked(root, registry, {})
    shown = run.run(asked, found.id, most=_STAGES)
    assert isinstance(shown, View), "its whole id was given"
    reader = TrainingReader(root)
    stages = curves.trained(asked, found)
    texts = registry.run_texts(found.id)
    whole = json.loads(texts["environment"])
    overrides = [str(item) for item in json.loads(texts["overrides"])]
    evaluations = [
        digest
        for stage in registry.stages_of(found.id)
        for role, digest in stage.outputs.items()
        if role == "evaluation"
    ]
    centre = _centre(registry, found.id)
    hood = around(registry, centre, depth=_DEPTH, directions=(UP,)) if centre else None
    more: dict[str, Any] = {
        **shown.more,
        "drawn": [
            curves.drawn(found, reader.training(registry, stage)) for stage in stages[:_TRAININGS]
        ],
        "more_trainings": max(len(stages) - _TRAININGS, 0),
        "acceptance": _held(root, registry, evaluations),
        "hood": hood,
        "svg": graph.draw(hood, lambda _: None, lambda _: None) if hood else "",
        "sides": [graph.both(hood)[0]] if hood else [],
        "config": layers(texts["manifest_text"], overrides, json.loads(texts["resolved"])),
        "manifest": texts["manifest_text"],
        "environment": environments.leaves(whole) or whole,
    }
    return View("report.html", f"Run {found.id}, {found.name}", shown.document, more)


def _held(root: Path, registry: ReadRegistry, digests: list[str]) -> Any:
    """The evaluations that are still in the store, side by side."""
    there = [d for d in digests if (root / "objects" / d[:2] / d / "evaluation.json").is_file()]
    return held_together(registry, table(registry, root, there)) if there else None


def _centre(registry: ReadRegistry, run_id: str) -> str | None:
    made = [
        (role, digest)
        for stage in registry.stages_of(run_id)
        for role, digest in stage.outputs.items()
    ]
    for wanted in _ENDS:
        for role, digest in made:
            if role == wanted:
                return digest
    return made[-1][1] if made else None
