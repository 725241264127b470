"""A lineage as a drawing and as a tree, from sources on the left to what came of them. Pure.

The drawing is for the eye and the mouse: the tree beside it says the same, link by link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kimi_eagle.identity import short
from kimi_eagle.records import Node
from kimi_eagle.registry.neighbourhood import DOWN, UP, Fold, Neighbourhood
from kimi_eagle.terminal import cut

_WIDE, _HIGH, _GAP_X, _GAP_Y, _EDGE = 168, 40, 56, 12, 8
_LABEL = 22

Address = Callable[[str], str | None]
"""From a digest or a fold's id to where it leads; None where there are no links."""


@dataclass(frozen=True)
class Branch:
    """A node of the tree, by what led to it, and what is below it."""

    node: Node | None
    fold: Fold | None
    by: str
    below: tuple[Branch, ...] = ()
    again: bool = False
    """Whether what is below it was listed above."""


def tree(found: Neighbourhood, direction: str) -> list[Branch]:
    """What lies on one side of the centre, nearest first."""
    ups = direction == UP
    edges: dict[str, list[tuple[str, str]]] = {}
    for edge in found.edges:
        at, other = (edge.target, edge.source) if ups else (edge.source, edge.target)
        by = (at, other, edge.stage or f"member {edge.role}")
        edges.setdefault(by[0], []).append((by[1], by[2]))
    folds: dict[str, list[Fold]] = {}
    for fold in found.folds:
        if fold.direction == direction:
            folds.setdefault(fold.parent, []).append(fold)
    opened: set[str] = set()

    def below(at: str) -> tuple[Branch, ...]:
        opened.add(at)
        branches = []
        for other, by in sorted(dict.fromkeys(edges.get(at, ()))):
            seen = other in opened
            more = bool(edges.get(other) or folds.get(other))
            branches.append(
                Branch(found.nodes[other], None, by, () if seen else below(other), seen and more)
            )
        branches += [Branch(None, fold, fold.stage or "member") for fold in folds.get(at, ())]
        return tuple(branches)

    return list(below(found.centre))


def draw(found: Neighbourhood, artifact: Address, expand: Callable[[Fold], str | None]) -> Markup:
    """The drawing; links go where the two functions say."""
    columns = columns_of(found)
    places: dict[str, tuple[float, float]] = {}
    tallest = max(len(column) for column in columns)
    height = 2 * _EDGE + tallest * (_HIGH + _GAP_Y) - _GAP_Y
    width = 2 * _EDGE + len(columns) * (_WIDE + _GAP_X) - _GAP_X
    for number, column in enumerate(columns):
        left = float(_EDGE + number * (_WIDE + _GAP_X))
        start = (height - len(column) * (_HIGH + _GAP_Y) + _GAP_Y) / 2
        for row, item in enumerate(column):
            places[item] = (left, start + row * (_HIGH + _GAP_Y))
    folds = {fold.id: fold for fold in found.folds}
    parts = [
        _edge(places, edge.source, edge.target, edge.stage or "member") for edge in found.edges
    ]
    for fold in folds.values():
        pair = (fold.id, fold.parent) if fold.direction == UP else (fold.parent, fold.id)
        parts.append(_edge(places, *pair, fold.stage or "member"))
    for item, (x, y) in places.items():
        if item in folds:
            fold = folds[item]
            count = f"{fold.count}{'+' if fold.more else ''} {fold.kind}"
            parts.append(_box(x, y, "fold", count, "not shown", expand(fold)))
        else:
            node = found.nodes[item]
            look = "centre" if item == found.centre else "node"
            if node.state in ("evicted", "missing"):
                look += " gone"
            name = cut(node.label or short(item), _LABEL)
            there = node.state in ("present", "external")
            what = node.kind if there else f"{node.kind}, {node.state}"
            parts.append(_box(x, y, look, what, name, artifact(item)))
    return Markup(
        '<svg class="graph" viewBox="0 0 {0} {1}" width="{0}" height="{1}" aria-hidden="true">'
        "{2}</svg>"
    ).format(round(width), round(height), Markup("").join(parts))


def columns_of(found: Neighbourhood) -> list[list[str]]:
    """Nodes and folds by column: each to the right of all that went into it."""
    above: dict[str, set[str]] = {digest: set() for digest in found.nodes}
    for edge in found.edges:
        above[edge.target].add(edge.source)
    for fold in found.folds:
        if fold.direction == UP:
            above[fold.id] = set()
            above[fold.parent].add(fold.id)
        else:
            above[fold.id] = {fold.parent}
    depth: dict[str, int] = {}
    for item in above:
        _depth(item, above, depth)
    # What nothing went into stands beside what it goes into, not at the far left.
    below: dict[str, list[str]] = {}
    for item, sources in above.items():
        for source in sources:
            below.setdefault(source, []).append(item)
    for item in sorted(above, key=lambda one: -depth[one]):
        if item != found.centre and not above[item] and item in below:
            depth[item] = min(depth[other] for other in below[item]) - 1
    lowest = min(depth.values())
    columns: list[list[str]] = [[] for _ in range(max(depth.values()) - lowest + 1)]
    for item, at in depth.items():
        columns[at - lowest].append(item)
    return _ordered([column for column in columns if column], above)


def _depth(item: str, above: Mapping[str, set[str]], depth: dict[str, int]) -> int:
    """How many steps lead to an item at the most."""
    stack = [item]
    while stack:
        at = stack[-1]
        left = [source for source in above[at] if source not in depth]
        if left and len(stack) <= len(above):  # else a circle, which no lineage has
            stack += left[:1]
            continue
        depth[at] = 1 + max((depth.get(source, 0) for source in above[at]), default=-1)
        stack.pop()
    return depth[item]


def _ordered(columns: list[list[str]], above: Mapping[str, set[str]]) -> list[list[str]]:
    """Each column in the order of what it came from, so that few edges cross."""
    rank: dict[str, float] = {}
    for column in columns:
        column.sort(
            key=lambda one: (
                sum(rank.get(source, 0.5) for source in above[one]) / (len(above[one]) or 1)
                if above[one]
                else 0.5
            )
        )
        for place, item in enumerate(column):
            rank[item] = (place + 0.5) / len(column)
    return columns


def _edge(places: Mapping[str, tuple[float, float]], source: str, target: str, by: str) -> Markup:
    (x1, y1), (x2, y2) = places[source], places[target]
    x1, y1, y2 = x1 + _WIDE, y1 + _HIGH / 2, y2 + _HIGH / 2
    bend = max((x2 - x1) / 2, 16)
    return Markup(
        '<path class="edge" d="M{} {}C{} {} {} {} {} {}"><title>{}</title></path>'
    ).format(*(round(value) for value in (x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2)), by)


def _box(x: float, y: float, look: str, top: str, name: str, href: str | None) -> Markup:
    box = Markup(
        '<g class="{0}"><rect x="{1}" y="{2}" width="{3}" height="{4}" rx="6"/>'
        '<text class="what" x="{5}" y="{6}">{7}</text>'
        '<text class="name" x="{5}" y="{8}">{9}</text></g>'
    ).format(
        *(look, round(x), round(y), _WIDE, _HIGH, round(x) + 8, round(y) + 16, top),
        *(round(y) + 32, name),
    )
    if href is None:
        return box
    return Markup('<a href="{}" tabindex="-1">{}</a>').format(href, box)


def both(found: Neighbourhood) -> Sequence[tuple[str, list[Branch]]]:
    """The tree's two sides, with their headings."""
    return [("Came from", tree(found, UP)), ("Led to", tree(found, DOWN))]
