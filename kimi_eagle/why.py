"""Why each stage of a manifest would run, or not: its key document against that of the nearest
earlier run, field by field.

    $ kimi-eagle why manifest.yaml draft
    draft  depends  496e9b82db30  lr 3e-05 → 0.0001
    draft  depends  496e9b82db30  input states: states would run (layers [2, 4, 5] → [2, 5, 6])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kimi_eagle.manifest.load import LoadedManifest, load
from kimi_eagle.outcome import Reporter
from kimi_eagle.pins import Pins, open_verifier
from kimi_eagle.plan import DEPENDS, REUSE, StagePlan, differences
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.runner import Runner
from kimi_eagle.stages.catalog import KINDS


@dataclass(frozen=True)
class Reasons:
    """Of one stage: what would be done, and why."""

    name: str
    kind: str
    action: str
    key: str | None
    against: str | None
    """The earlier run that it is compared with: the one that made it, where it is reused."""
    reasons: tuple[str, ...]


def why(
    root: Path, path: Path, overrides: Sequence[str], stage: str | None, reporter: Reporter
) -> list[Reasons]:
    """Raises: ManifestError, RegistryError; LookupError for a stage that is not in the manifest."""
    loaded = load(path, overrides)
    if stage is not None and stage not in loaded.manifest.stages:
        near = get_close_matches(stage, loaded.manifest.stages, 1)
        known = ", ".join(loaded.manifest.stages)
        hint = f"did you mean {near[0]}?" if near else f"its stages are {known}"
        raise LookupError(f"{path} has no stage {stage}; {hint}")
    open_verifier(loaded)
    runner = Runner(root, reporter)
    try:
        pins = runner.pin(loaded)
        stages = {item.name: item for item in runner.plan(loaded, pins)}
        return [
            _of(runner, loaded, pins, stages, item, alone=stage is not None)
            for item in stages.values()
            if stage in (None, item.name)
        ]
    finally:
        runner.close()


def document(found: Sequence[Reasons]) -> dict[str, Any]:
    """As `why --json` prints it."""
    return {"stages": [asdict(item) for item in found]}


def _of(
    runner: Runner,
    loaded: LoadedManifest,
    pins: Pins,
    stages: Mapping[str, StagePlan],
    stage: StagePlan,
    *,
    alone: bool,
) -> Reasons:
    if stage.action == REUSE and stage.made is not None:
        same = "kind, code version, parameters and inputs are those of that run"
        return _reasons(stage, stage.made, [*stage.reasons, same])
    if stage.action != DEPENDS:
        against = stage.made or runner.history.latest_of(stage.kind, stage.name)
        return _reasons(stage, against, stage.reasons)
    before = runner.history.latest_of(stage.kind, stage.name)
    found = []
    if before is None or before.document is None:
        found.append("never made before")
    else:
        found += _foreseen(runner, loaded, pins, stage, before)
    for role, source in loaded.manifest.upstream(stage.name):
        other = stages[source]
        if other.action != REUSE:
            # Beside all the others, those have lines of their own.
            because = f" ({'; '.join(other.reasons)})" if alone else ""
            found.append(f"input {role}: {source} would run first{because}")
    return _reasons(stage, before, found)


def _reasons(stage: StagePlan, against: ExecutionRecord | None, reasons: Sequence[str]) -> Reasons:
    return Reasons(
        stage.name,
        stage.kind,
        stage.action,
        stage.key,
        against.run_id if against is not None else None,
        tuple(reasons),
    )


def _foreseen(
    runner: Runner,
    loaded: LoadedManifest,
    pins: Pins,
    stage: StagePlan,
    before: ExecutionRecord,
) -> list[str]:
    """What differs whatever the inputs that are not made yet will be."""
    kind, old = KINDS[stage.kind], dict(before.document or {})
    new = {
        "kind": stage.kind,
        "code_version": kind.code_version,
        "parameters": json.loads(
            json.dumps(
                kind.identity(loaded.manifest.stages[stage.name], pins.verifier.facts),
                allow_nan=False,
            )
        ),
        "inputs": stage.inputs,
    }
    known = {role: items for role, items in old["inputs"].items() if role in stage.inputs}
    return differences({**old, "inputs": known}, new, lambda d: runner.named(pins, d))
