"""A lineage as a drawing and as a tree, from sources on the left to what came of them. Pure.

The drawing is for the eye and the mouse: the tree beside it says the same, link by link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from kimi_eagle.identity import short
from kimi_eagle.records import Node
from kimi_eagle.registry.neighbourhood import DOWN, UP, Fold, Neighbourhood
from kimi_eagle.terminal import cut

_WIDE, _HIGH, _GAP_X, _GAP_Y, _EDGE = 150, 40, 44, 12, 8
_LABEL = 20
# What the name of an edge's place in a column begins with.
_PASSING = "\0"

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
    folds = {fold.id: fold for fold in found.folds}
    edges = [(edge.source, edge.target, edge.stage or "member") for edge in found.edges]
    for fold in folds.values():
        pair = (fold.id, fold.parent) if fold.direction == UP else (fold.parent, fold.id)
        edges.append((*pair, fold.stage or "member"))
    columns, ways = _routed(columns_of(found), edges)
    heights = [sum(_high(item) + _GAP_Y for item in column) - _GAP_Y for column in columns]
    height = 2 * _EDGE + max(heights)
    width = 2 * _EDGE + len(columns) * (_WIDE + _GAP_X) - _GAP_X
    places: dict[str, tuple[float, float]] = {}
    for number, column in enumerate(columns):
        y = (height - heights[number]) / 2
        for item in column:
            places[item] = (float(_EDGE + number * (_WIDE + _GAP_X)), y)
            y += _high(item) + _GAP_Y
    parts = [_edge(places, way, by) for way, by in ways]
    for item, (x, y) in places.items():
        if item in folds:
            fold = folds[item]
            count = f"{fold.count}{'+' if fold.more else ''} {fold.kind}"
            parts.append(_box(x, y, "fold", count, "not shown", expand(fold)))
        elif item in found.nodes:
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
    return [column for column in columns if column]


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
    """Each column in the order of what it came from, so that few edges cross; then of what came of
    it, from the right."""
    below: dict[str, set[str]] = {}
    for item, sources in above.items():
        for source in sources:
            below.setdefault(source, set()).add(item)
    rank: dict[str, float] = {}
    for order, beside in ((columns, above), (columns[::-1], below), (columns, above)):
        for column in order:
            by = {one: _middle(beside.get(one, ()), rank) for one in column}
            column.sort(key=by.__getitem__)
            rank |= {item: (place + 0.5) / len(column) for place, item in enumerate(column)}
    return columns


def _middle(others: Collection[str], rank: Mapping[str, float]) -> float:
    known = [rank[other] for other in others if other in rank]
    return sum(known) / len(known) if known else 0.5


def _routed(
    columns: Sequence[Sequence[str]], edges: Sequence[tuple[str, str, str]]
) -> tuple[list[list[str]], list[tuple[list[str], str]]]:
    """The columns with room for edges that pass through them, in an order in which few cross, and
    of each edge what it leads along. Edges of one source go together as far as they can."""
    at = {item: number for number, column in enumerate(columns) for item in column}
    wider = [list(column) for column in columns]
    above: dict[str, set[str]] = {item: set() for item in at}
    ways: list[tuple[list[str], str]] = []
    for source, target, by in edges:
        way = [source]
        for number in range(at[source] + 1, at[target]):
            passing = f"{_PASSING}{number}.{source}"
            if passing not in above:
                above[passing] = {way[-1]}
                wider[number].append(passing)
            way.append(passing)
        above[target].add(way[-1])
        ways.append(([*way, target], by))
    return _ordered(wider, above), ways


def _high(item: str) -> int:
    """The height that an item takes; an edge that passes takes little."""
    return _HIGH // 4 if item.startswith(_PASSING) else _HIGH


def _edge(places: Mapping[str, tuple[float, float]], way: Sequence[str], by: str) -> Markup:
    parts = []
    for item, following in pairwise(way):
        x, y = places[item]
        to_x, to_y = places[following]
        x, y, to_y = x + _WIDE, y + _high(item) / 2, to_y + _high(following) / 2
        bend = (to_x - x) / 2
        if item == way[0]:
            parts.append(f"M{x:.0f} {y:.0f}")
        parts.append(f"C{x + bend:.0f} {y:.0f} {to_x - bend:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}")
        if following != way[-1]:
            parts.append(f"H{to_x + _WIDE:.0f}")
    return Markup('<path class="edge" d="{}"><title>{}</title></path>').format("".join(parts), by)


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
