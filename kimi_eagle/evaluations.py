"""The evaluations that hashes stand for, as the registry and the store have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kimi_eagle.acceptance_table import Evaluation, Table
from kimi_eagle.identity import short
from kimi_eagle.registry.search import RUN, Search
from kimi_eagle.registry.store import Registry


def compared(root: Path, prefixes: Sequence[str]) -> Table:
    """The table of evaluations, checkpoints, releases and runs, each by the start of its hash.

    A checkpoint stands for its latest evaluation, a release for the one it was gated on, a run for
    all of its own.

    Raises: RegistryError, UnknownDigest, AmbiguousDigest; LookupError for what has no evaluation;
        OSError for one that is gone from the store.
    """
    registry = Registry(root, create=False)
    try:
        return table(registry, root, prefixes)
    finally:
        registry.close()


def table(registry: Registry, root: Path, prefixes: Sequence[str]) -> Table:
    """The same, of a registry that is open; raises likewise."""
    found: dict[str, Evaluation] = {}
    for prefix in prefixes:
        digest, kind = Search(registry).find(prefix)
        for evaluation in _evaluations(registry, digest, kind):
            name = short(digest)
            if any(one.name == name for one in found.values()):
                name = short(evaluation)
            found.setdefault(evaluation, _read(registry, root, evaluation, name))
    return Table(tuple(found.values()))


def _evaluations(registry: Registry, digest: str, kind: str) -> list[str]:
    if kind == "evaluation":
        return [digest]
    if kind == RUN:
        made = registry.stages_of(digest)
        found = [one.outputs["evaluation"] for one in made if "evaluation" in one.outputs]
    elif kind == "checkpoint":
        taken = [one for one in registry.consumers(digest) if one.kind == "evaluate"]
        found = [one.outputs["evaluation"] for one in taken if "evaluation" in one.outputs][-1:]
    else:
        _, edges = registry.lineage(digest, up=True, down=False)
        found = [
            edge.source for edge in edges if (edge.target, edge.role) == (digest, "evaluation")
        ]
    if not found:
        raise LookupError(
            f"{kind} {short(digest)} has no evaluation; name a checkpoint that was evaluated, an "
            "evaluation, a release or a run"
        )
    return list(dict.fromkeys(found))


def _read(registry: Registry, root: Path, digest: str, name: str) -> Evaluation:
    path = root / "objects" / digest[:2] / digest / "evaluation.json"
    document = json.loads(path.read_text("utf-8"))
    made = registry.producers(digest)
    speeds = made[-1].metrics.get("speeds", ()) if made else ()
    return Evaluation(name, digest, document, speeds)
