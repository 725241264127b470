"""What `diff` is given: a manifest file, or the hash of something in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kimi_eagle.comparison import weight_norms
from kimi_eagle.difference import (
    Comparison,
    Side,
    SideStage,
    compare,
    files_of,
    rows_by_source,
    side_of,
)
from kimi_eagle.manifest.load import load
from kimi_eagle.outcome import Reporter
from kimi_eagle.pins import open_verifier
from kimi_eagle.registry.store import Registry
from kimi_eagle.runner import Runner
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.weights import Weights

# Kinds of artifacts that hold a model's weights.
_WEIGHTS = ("checkpoint", "head", "release")
_MANIFESTS = (".yaml", ".yml")


def compared(root: Path, a: str, b: str, reporter: Reporter) -> Comparison:
    """Two sides, each a manifest's path, or a hash or run's id or the start of it.

    Raises: ManifestError, RegistryError, UnknownDigest, AmbiguousDigest, CannotReproduce.
    """
    named = [name for name in (a, b) if not _is_manifest(name)]
    registry = Registry(root, create=False) if named else None
    try:
        sides = []
        for name in (a, b):
            if registry is None or _is_manifest(name):
                sides.append(manifest_side(root, Path(name), reporter))
            else:
                sides.append(side_of(registry, root, name))
    finally:
        if registry is not None:
            registry.close()
    found = compare(*sides)
    try:
        return weighed(root, found)
    except OSError as error:
        reporter.note(f"no norms of weights: {error}")
        return found


def weighed(root: Path, found: Comparison) -> Comparison:
    """The same with the norms of both sides' weights, where both have some and not the same.

    Raises: OSError: they could not be compared; the message says why.
    """
    outputs = [weights_of(side) for side in (found.a, found.b)]
    if None in outputs or outputs[0] == outputs[1]:
        return found
    folders = [root / "objects" / digest[:2] / digest for digest in outputs if digest]
    return replace(found, weights=Weights(tuple(weight_norms(*folders))))


def weights_of(side: Side) -> str | None:
    """The artifact with weights that a side is of: itself, or the one checkpoint it comes by."""
    if side.kind in _WEIGHTS:
        return side.name
    trained = side.of_kind("train")
    return trained[0].output if len(trained) == 1 else None


def manifest_side(
    root: Path, path: Path, reporter: Reporter, overrides: Sequence[str] = ()
) -> Side:
    """A manifest as it would run now: with what is there already of what it would make."""
    loaded = load(path, overrides)
    open_verifier(loaded)
    runner = Runner(root, reporter)
    try:
        pins = runner.pin(loaded)
        stages = []
        for stage in runner.plan(loaded, pins):
            kind = KINDS[stage.kind]
            made = stage.made
            sources = {
                role: files_of([item.record for item in items])
                for role, items in pins.stages[stage.name].items()
            }
            output = made.outputs[kind.output] if made is not None else None
            artifact = runner.registry.artifact(output) if output is not None else None
            stages.append(
                SideStage(
                    stage.name,
                    stage.kind,
                    kind.code_version,
                    kind.identity(loaded.manifest.stages[stage.name], pins.verifier.facts),
                    sources,
                    rows_by_source(artifact, sources, root / "objects") if artifact else {},
                    stage.key,
                    output,
                    made.metrics if made is not None else {},
                    made.environment if made is not None else {},
                )
            )
        return Side(str(path), "manifest", tuple(stages))
    finally:
        runner.close()


def _is_manifest(name: str) -> bool:
    return Path(name).suffix in _MANIFESTS
