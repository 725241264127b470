"""Acceptance lengths of evaluations, a row for each set and evaluation.

What was served and what was simulated are of different things: two drawings, never one axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle.acceptance_table import Evaluation, Line, Table
from kimi_eagle.evaluations import table
from kimi_eagle.published import SOURCE, published
from kimi_eagle.registry import browse
from kimi_eagle.registry.store import Registry
from kimi_eagle.ui import bars
from kimi_eagle.ui.view import Asked, View

_MOST = 12
_FIGURES = (
    "prompts",
    "conversations",
    "draft_steps",
    "acceptance_length",
    "standard_error",
    "acceptance_length_reason",
    "per_position",
    "outputs_identical",
    "outputs_reason",
)


@dataclass(frozen=True)
class Shown:
    """Evaluations for the template: the document, and the drawings."""

    document: Mapping[str, Any]
    served: Any
    simulated: Any


def acceptance(asked: Asked) -> View:
    """Raises: UnknownDigest, AmbiguousDigest; LookupError for what has no evaluation."""
    wanted = list(dict.fromkeys(asked.all("of")))[:_MOST]
    choices = browse.evaluations(asked.registry)
    chosen = {choice["digest"] for choice in choices if choice["digest"] in wanted}
    more: dict[str, Any] = {"choices": choices, "chosen": chosen, "wanted": wanted, "shown": None}
    document: dict[str, Any] = {"of": wanted, "evaluations_known": choices}
    if wanted:
        more["shown"] = shown = held_together(
            asked.registry, table(asked.registry, asked.root, wanted)
        )
        document |= shown.document
    return View("acceptance.html", "Acceptance", document, more)


def held_together(registry: Registry, found: Table) -> Shown:
    """The rows of a table, what of them cannot be compared, and both drawings."""
    versions = {one.digest: _engine(registry, one) for one in found.evaluations}
    apart = {one.digest: found.unlike(one) if place else [] for place, one in _numbered(found)}
    rows = [
        _row(one, line, versions[one.digest], apart[one.digest])
        for line in found.lines
        for one in found.evaluations
        if line in one.lines
    ]
    simulated = [
        {
            "evaluation": one.digest,
            "name": one.name,
            "acceptance_length": one.document.get("simulated_acceptance_length"),
            "gap": one.document.get("simulated_gap"),
            "draft_tokens": one.document.get("draft_tokens"),
            "apart": apart[one.digest],
        }
        for one in found.evaluations
        if one.document.get("simulated_acceptance_length") is not None
    ]
    document = {
        "evaluations": [
            {"digest": one.digest, "name": one.name, "checkpoint": one.document.get("checkpoint")}
            for one in found.evaluations
        ],
        "rows": rows,
        "simulated": simulated,
        "notes": found.notes(),
        "published": SOURCE,
    }
    return Shown(document, bars.served(rows), bars.simulated(simulated))


def _numbered(found: Table) -> Sequence[tuple[int, Evaluation]]:
    return list(enumerate(found.evaluations))


def _row(one: Evaluation, line: Line, engine: str, apart: Sequence[str]) -> dict[str, Any]:
    figures = one.lines[line]
    speed: Mapping[str, Any] = next(
        (
            item
            for item in one.speeds
            if (item["set"], item["draft_tokens"], float(item["temperature"]), item.get("batch", 1))
            == line
        ),
        {},
    )
    reference = published(line[0], line[1])
    return {
        "set": line[0],
        "draft_tokens": line[1],
        "temperature": line[2],
        "batch": line[3],
        "evaluation": one.digest,
        "name": one.name,
        "engine": engine,
        **{name: figures.get(name) for name in _FIGURES},
        "tokens_per_second": speed.get("tokens_per_second"),
        "speedup": speed.get("speedup"),
        "published": list(reference) if reference else None,
        "apart": list(apart),
    }


def _engine(registry: Registry, one: Evaluation) -> str:
    name = str(one.document.get("engine") or "unknown")
    made = registry.producers(one.digest)
    packages = (made[-1].environment.get("packages") or {}) if made else {}
    version = packages.get(name) or packages.get(f"{name}-cpu")
    return f"{name} {version}" if version else name
