"""Compose the parts: what each command of the CLI does, free of parsing and of printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.manifest.load import LoadedManifest, load
from kimi_eagle.outcome import Reporter, RunOutcome
from kimi_eagle.pins import open_verifier, pin
from kimi_eagle.plan import DEPENDS, REUSE, RUN, StagePlan
from kimi_eagle.records import ArtifactRecord, Edge, ExecutionRecord, Node, RunRecord
from kimi_eagle.registry.store import Registry
from kimi_eagle.runner import Runner


@dataclass(frozen=True)
class Validation:
    loaded: LoadedManifest
    verifier_checked: bool


@dataclass(frozen=True)
class Planned:
    stages: list[StagePlan]

    def counts(self) -> dict[str, int]:
        return {
            action: sum(stage.action == action for stage in self.stages)
            for action in (REUSE, RUN, DEPENDS)
        }

    def document(self) -> dict[str, Any]:
        """As `plan --json` prints it."""
        return {
            "stages": [
                {
                    "name": stage.name,
                    "kind": stage.kind,
                    "action": stage.action,
                    "key": stage.key,
                    "reasons": stage.reasons,
                    "outputs": dict(stage.made.outputs) if stage.made else {},
                }
                for stage in self.stages
            ]
        }


@dataclass(frozen=True)
class Shown:
    """What a hash names: exactly one of the two, with what belongs to it."""

    run: RunRecord | None = None
    stages: Sequence[ExecutionRecord] = ()
    texts: Mapping[str, str] | None = None
    artifact: ArtifactRecord | None = None
    producers: Sequence[ExecutionRecord] = ()
    consumers: Sequence[ExecutionRecord] = ()


@dataclass(frozen=True)
class Lineage:
    digest: str
    nodes: Sequence[Node]
    edges: Sequence[Edge]

    def document(self) -> dict[str, Any]:
        """As `lineage --json` prints it."""
        return {
            "nodes": [asdict(node) for node in self.nodes],
            "edges": [
                {"from": edge.source, "to": edge.target, "stage": edge.stage, "role": edge.role}
                for edge in self.edges
            ],
        }


def validate(path: Path, overrides: Sequence[str]) -> Validation:
    """Check a manifest; against the verifier too, where its folder is on this machine.

    Raises: ManifestError.
    """
    loaded = load(path, overrides)
    present = (loaded.folder / loaded.manifest.verifier.path).exists()
    if present:
        open_verifier(loaded)
    return Validation(loaded, present)


def plan(root: Path, path: Path, overrides: Sequence[str], reporter: Reporter) -> Planned:
    """Raises: ManifestError, RegistryError."""
    loaded = load(path, overrides)
    open_verifier(loaded)
    runner = Runner(root, reporter)
    try:
        return Planned(runner.plan(loaded, pin(loaded, runner.digests)))
    finally:
        runner.close()


def submit(root: Path, path: Path, overrides: Sequence[str], reporter: Reporter) -> RunOutcome:
    """Raises: ManifestError, RegistryError: nothing was started."""
    loaded = load(path, overrides)
    open_verifier(loaded)
    runner = Runner(root, reporter)
    try:
        return runner.submit(loaded)
    finally:
        runner.close()


def runs(root: Path, limit: int | None) -> list[tuple[RunRecord, list[ExecutionRecord]]]:
    """Raises: RegistryError when there is no registry."""
    registry = Registry(root, create=False)
    try:
        return [(run, registry.stages_of(run.id)) for run in registry.list_runs(limit)]
    finally:
        registry.close()


def show(root: Path, prefix: str) -> Shown:
    """Raises: RegistryError, UnknownDigest, AmbiguousDigest."""
    registry = Registry(root, create=False)
    try:
        digest, kind = registry.resolve(prefix)
        if kind == "run":
            return Shown(
                run=registry.run(digest),
                stages=registry.stages_of(digest),
                texts=registry.run_texts(digest),
            )
        return Shown(
            artifact=registry.artifact(digest),
            producers=registry.producers(digest),
            consumers=registry.consumers(digest),
        )
    finally:
        registry.close()


def lineage(root: Path, prefix: str, *, up: bool, down: bool) -> Lineage:
    """Raises: RegistryError, UnknownDigest, AmbiguousDigest."""
    registry = Registry(root, create=False)
    try:
        digest, kind = registry.resolve(prefix)
        if kind == "run":
            raise LookupError(
                f"{prefix} is a run; `kimi-eagle show {prefix}` lists its artifacts, and each of "
                "them has a lineage"
            )
        nodes, edges = registry.lineage(digest, up=up, down=down)
        return Lineage(digest, nodes, edges)
    finally:
        registry.close()
