"""What lies around an artifact in its lineage: a few steps up and down, what is alike folded.

One verifier can have led to a hundred thousand artifacts: never more than a page of them is read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_eagle.records import Edge, Node
from kimi_eagle.registry.ledger import marks
from kimi_eagle.registry.store import LED, MEMBERS, Registry

UP, DOWN = "up", "down"
Group = tuple[str | None, str]
"""Neighbours that are alike: the stage that leads to them (None: members), and their kind."""

MOST_NODES = 100
# So many alike beside each other are shown one by one.
_ALIKE = 3
# Of one node's neighbours, as many as are read; of an opened group likewise.
_MOST_READ = 200
# Beyond this, that there are more is all that is said.
_MOST_COUNTED = 5_000


@dataclass(frozen=True)
class Fold:
    """Neighbours of one node that are not shown: alike, or beyond what a page holds."""

    id: str
    """What opens it: `<parent's hash, short>.<direction>.<stage or member>.<kind>`."""
    parent: str
    direction: str
    stage: str | None
    kind: str
    count: int
    more: bool = False
    """Whether there are more than `count`."""


@dataclass
class Neighbourhood:
    """Nodes by digest, each within some steps of `centre`, and what was left out."""

    centre: str
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[Edge, None] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "centre": self.centre,
            "nodes": [asdict(node) for node in self.nodes.values()],
            "edges": [
                {"from": edge.source, "to": edge.target, "stage": edge.stage, "role": edge.role}
                for edge in self.edges
            ],
            "folded": [asdict(fold) for fold in self.folds],
        }


def around(
    registry: Registry,
    digest: str,
    *,
    depth: int = 2,
    directions: Collection[str] = (UP, DOWN),
    opened: Collection[str] = (),
    most: int = MOST_NODES,
) -> Neighbourhood:
    """The lineage of an artifact that is known, as far as `depth` steps.

    Args:
        opened: folds that are to be shown one by one, by id.
        most: nodes at the most; what else there is becomes folds.
    """
    found = Neighbourhood(digest)
    with registry.database.read() as connection:
        found.nodes |= {node.digest: node for node in _nodes(connection, [digest])}
        for direction in (UP, DOWN):
            frontier = [digest] if direction in directions else []
            for _ in range(depth):
                frontier = [
                    other
                    for node in frontier
                    for other in _step(connection, found, node, direction, opened, most)
                ]
        _close(connection, found)
    return found


def _step(
    connection: sqlite3.Connection,
    found: Neighbourhood,
    at: str,
    direction: str,
    opened: Collection[str],
    most: int,
) -> list[str]:
    """Add the neighbours of a node on one side; returns those that are new."""
    edges, more = _neighbours(connection, at, direction)
    counts: dict[Group, int] = {}
    beyond = False
    if more:
        counts, beyond = _counts(connection, at, direction)
        for stage, kind in counts:
            if stage is not None and _fold(at, direction, stage, kind) in opened:
                edges += _neighbours(connection, at, direction, stage)[0]
    known = {n.digest: n for n in _nodes(connection, [_other(edge, direction) for edge in edges])}
    groups: dict[Group, list[Edge]] = {group: [] for group in counts}
    for edge in dict.fromkeys(edges):
        other = known.get(_other(edge, direction))
        if other is not None:
            groups.setdefault((edge.stage, other.kind), []).append(edge)
    fresh: list[str] = []
    # Few alike first: many may take all the room that there is.
    for (stage, kind), members in sorted(groups.items(), key=lambda item: len(item[1])):
        others = list(dict.fromkeys(_other(edge, direction) for edge in members))
        count = max(counts.get((stage, kind), 0), len(others))
        fold = _fold(at, direction, stage, kind)
        wanted = others if count <= _ALIKE or fold in opened else []
        new = [other for other in wanted if other not in found.nodes]
        new = new[: max(most - len(found.nodes), 0)]
        found.nodes |= {other: known[other] for other in new}
        fresh += new
        # What is on the page already is no news; its edge is drawn whatever is folded.
        found.edges |= dict.fromkeys(e for e in members if _other(e, direction) in found.nodes)
        hidden = count - sum(other in found.nodes for other in others)
        if hidden > 0:
            found.folds.append(Fold(fold, at, direction, stage, kind, hidden, beyond))
    return fresh


def _close(connection: sqlite3.Connection, found: Neighbourhood) -> None:
    """Add the edges between what is shown that no step came along."""
    inner = list(found.nodes)
    listed = marks(inner)
    for query, source, target in ((LED, "i.digest", "o.digest"), (MEMBERS, "child", "parent")):
        rows = connection.execute(
            # Looked for by target alone (`+`): few things go into one, but one may go into all.
            f"{query} {target} in ({listed}) and +{source} in ({listed})",
            [*inner, *inner],
        )
        found.edges.update(dict.fromkeys(Edge(*row) for row in rows))


def _neighbours(
    connection: sqlite3.Connection, at: str, direction: str, stage: str | None = None
) -> tuple[list[Edge], bool]:
    """The first edges on one side of a node, by one stage where it is given, and whether there
    are more."""
    led, member = ("o.digest", "parent") if direction == UP else ("i.digest", "child")
    queries: list[tuple[str, tuple[Any, ...]]] = [(f"{LED} {led} = ?", (at,))]
    if stage is None:
        queries.append((f"{MEMBERS} {member} = ?", (at,)))
    else:
        queries = [(f"{LED} {led} = ? and e.stage = ?", (at, stage))]
    found = [
        Edge(*row)
        for query, values in queries
        for row in connection.execute(f"{query} limit ?", (*values, _MOST_READ + 1))
    ]
    return found[:_MOST_READ], len(found) > _MOST_READ


def _counts(
    connection: sqlite3.Connection, at: str, direction: str
) -> tuple[dict[Group, int], bool]:
    """How many neighbours a node has on one side, by stage and kind, and whether there are even
    more."""
    (near, far), (inner, outer) = (
        (("o", "i"), ("parent", "child")) if direction == UP else (("i", "o"), ("child", "parent"))
    )
    query = (
        f"select e.stage as stage, {far}.digest as other from execution_inputs i "  # noqa: S608
        "join executions e on e.id = i.execution "
        f"join execution_outputs o on o.execution = e.id where {near}.digest = ? "
        "and (e.disposition in ('executed', 'reproduced') or o.role like 'snapshot@%') "
        f"union all select null, {outer} from artifact_members where {inner} = ? limit ?"
    )
    found: dict[Group, int] = {}
    read = 0
    for stage, kind, count, rows in connection.execute(
        "select f.stage, a.kind, count(distinct f.other), count(*) "  # noqa: S608
        f"from ({query}) f join artifacts a on a.digest = f.other group by f.stage, a.kind",
        (at, at, _MOST_COUNTED + 1),
    ):
        found[(stage, kind)] = count
        read += rows
    return found, read > _MOST_COUNTED


def _fold(at: str, direction: str, stage: str | None, kind: str) -> str:
    return f"{at[:12]}.{direction}.{stage or 'member'}.{kind}"


def _other(edge: Edge, direction: str) -> str:
    return edge.source if direction == UP else edge.target


def _nodes(connection: sqlite3.Connection, digests: Sequence[str]) -> Iterator[Node]:
    listed = list(dict.fromkeys(digests))
    rows = connection.execute(
        "select digest, kind, bytes, state, label from artifacts "  # noqa: S608
        f"where digest in ({marks(listed)})",
        listed,
    )
    yield from (Node(*row) for row in rows)
