"""A lineage as text for Graphviz. Pure.

$ kimi-eagle lineage 69b31e7e --dot | dot -Tsvg > lineage.svg
"""

from __future__ import annotations

from collections.abc import Sequence

from kimi_eagle.identity import short
from kimi_eagle.records import Edge, Node


def graph(nodes: Sequence[Node], edges: Sequence[Edge], centre: str, *, files: bool) -> str:
    """A directed graph from sources to what came of them; `centre` stands out.

    Files that are only members of a folder are one node together, unless `files`.
    """
    folded = {} if files else members_only(nodes, edges, centre)
    lines = ["digraph lineage {", "  rankdir=LR;", "  node [shape=box];"]
    for node in sorted(nodes, key=lambda node: (node.kind, node.digest)):
        if node.digest in folded:
            continue
        marks = ["style=bold"] if node.digest == centre else []
        if node.state not in ("present", "external"):
            marks = [*marks, "color=red"]
        texts = [node.kind, short(node.digest), node.label, _told(node)]
        label = _quoted("\n".join(text for text in texts if text))
        lines.append(f"  {_quoted(node.digest)} [{', '.join([f'label={label}', *marks])}];")
    for parent, count in sorted(_counts(folded).items()):
        lines.append(f"  {_quoted(parent + '/files')} [label={_quoted(f'{count} files')}];")
        lines.append(f"  {_quoted(parent + '/files')} -> {_quoted(parent)};")
    for edge in sorted(edges, key=lambda edge: (edge.source, edge.target, edge.stage or "")):
        if edge.source not in folded:
            label = _quoted(edge.stage or edge.role)
            lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)} [label={label}];")
    return "\n".join([*lines, "}"]) + "\n"


def members_only(nodes: Sequence[Node], edges: Sequence[Edge], centre: str) -> dict[str, str]:
    """The files that are in the lineage as members of one folder and as nothing else, each with
    its folder."""
    parents: dict[str, set[str]] = {}
    others = {centre}
    for edge in edges:
        others.add(edge.target)
        if edge.stage is None:
            parents.setdefault(edge.source, set()).add(edge.target)
        else:
            others.add(edge.source)
    kinds = {node.digest: node.kind for node in nodes}
    return {
        digest: next(iter(found))
        for digest, found in parents.items()
        if len(found) == 1 and digest not in others and kinds.get(digest) == "file"
    }


def _counts(folded: dict[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parent in folded.values():
        counts[parent] = counts.get(parent, 0) + 1
    return counts


def _told(node: Node) -> str:
    return "" if node.state in ("present", "external") else f"[{node.state}]"


def _quoted(text: str) -> str:
    """A quoted string of the DOT language that stands for exactly this text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + "".join(c if c.isprintable() else "\ufffd" for c in escaped) + '"'
