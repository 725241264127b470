"""What differs between two artifacts or runs: only what changed, and whether they compare."""

from __future__ import annotations

from typing import Any

from kimi_eagle.difference import SECTIONS, Comparison, compare, side_of
from kimi_eagle.registry.search import RUN
from kimi_eagle.sides import weighed, weights_of
from kimi_eagle.ui.view import Asked, View, address
from kimi_eagle.weights import HEADER

_LEAVES, _TENSORS = 400, 100


def diff(asked: Asked) -> View:
    """Raises: UnknownDigest, AmbiguousDigest, CannotReproduce."""
    a, b = (asked.one(name).strip() for name in ("a", "b"))
    if not a or not b:
        return View("diff.html", "Diff", {"a": a, "b": b}, {"found": None, "a": a, "b": b})
    sides = [side_of(asked.registry, asked.root, name) for name in (a, b)]
    found = compare(*sides)
    trouble = None
    if asked.flag("weights"):
        try:
            found = weighed(asked.root, found)
        except OSError as error:
            trouble = str(error)
    whole = asked.flag("all")
    document = {**found.document(whole=whole), "weights_trouble": trouble}
    maps = vocab_maps(found)
    outputs = [weights_of(side) for side in sides]
    more = {
        "found": found,
        "a": a,
        "b": b,
        "paths": [_path(side.kind, side.name) for side in sides],
        "sections": _sections(found, whole=whole),
        "whole": whole,
        "hidden": len(found.leaves) - len(found.different),
        "vocab_maps": maps,
        # Of the maps it is told in a line of its own.
        "warnings": [w for w in found.verdict.warnings if not (maps and "vocab maps" in w)],
        "trouble": trouble,
        "tensors": list(found.weights.rows(whole=whole))[:_TENSORS] if found.weights else [],
        "header": HEADER,
        "other": address("/diff", a=a, b=b, all=None if whole else 1, weights=asked.one("weights")),
        "weigh": address("/diff", a=a, b=b, all=1 if whole else None, weights=1)
        if None not in outputs and outputs[0] != outputs[1] and not found.weights
        else None,
    }
    return View("diff.html", f"Diff of {a[:12]} and {b[:12]}", document, more)


def vocab_maps(found: Comparison) -> tuple[list[str], list[str]] | None:
    """The vocab maps of both sides where they have some and not the same."""
    one, other = (
        sorted(stage.output for stage in side.of_kind("vocab") if stage.output)
        for side in (found.a, found.b)
    )
    return (one, other) if one and other and one != other else None


def _path(kind: str, name: str) -> str:
    return f"/runs/{name}" if kind == RUN else f"/artifacts/{name}"


def _sections(found: Comparison, *, whole: bool) -> list[dict[str, Any]]:
    shown = list(found.leaves) if whole else found.different
    sections = []
    for name in SECTIONS:
        leaves = [leaf for leaf in shown if leaf.section == name]
        if leaves:
            sections.append(
                {"name": name, "leaves": leaves[:_LEAVES], "hidden": max(len(leaves) - _LEAVES, 0)}
            )
    return sections
