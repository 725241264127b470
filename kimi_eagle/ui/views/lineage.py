"""The lineage around one artifact: a drawing, and the same as a tree."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_eagle.registry.neighbourhood import DOWN, UP, Fold, around
from kimi_eagle.ui import graph
from kimi_eagle.ui.view import Asked, Moved, View, address
from kimi_eagle.ui.views.finding import artifact_at

_DEEPEST = 8


@dataclass(frozen=True)
class Wanted:
    """What of a lineage is shown: the state of its page, all of it in the address."""

    digest: str
    depth: int
    directions: tuple[str, ...]
    opened: tuple[str, ...]

    def address(self, **changed: object) -> str:
        values = {
            "depth": self.depth if self.depth != 2 else None,
            "only": self.directions[0] if len(self.directions) == 1 else None,
            "open": list(self.opened),
        }
        return address(f"/artifacts/{self.digest}/lineage", **{**values, **changed})

    def expand(self, fold: Fold) -> str:
        """Where a fold is open; one that no page holds leads to what it hangs on."""
        if fold.id in self.opened:
            return address(f"/artifacts/{fold.parent}/lineage")
        return self.address(open=[*self.opened, fold.id])


def lineage(asked: Asked, digest: str) -> View | Moved:
    found = artifact_at(asked, digest, "/lineage")
    if isinstance(found, Moved):
        return found
    only = asked.one("only")
    wanted = Wanted(
        found.digest,
        asked.number("depth", 2, 1, _DEEPEST),
        (only,) if only in (UP, DOWN) else (UP, DOWN),
        tuple(dict.fromkeys(asked.all("open")))[:20],
    )
    hood = around(
        asked.registry,
        found.digest,
        depth=wanted.depth,
        directions=wanted.directions,
        opened=wanted.opened,
    )
    more = {
        "artifact": found,
        "wanted": wanted,
        "svg": graph.draw(hood, lambda d: address(f"/artifacts/{d}/lineage"), wanted.expand),
        "sides": graph.both(hood),
        "hidden": sum(fold.count for fold in hood.folds),
        "deeper": wanted.address(depth=wanted.depth + 1) if wanted.depth < _DEEPEST else None,
        "shallower": wanted.address(depth=wanted.depth - 1) if wanted.depth > 1 else None,
        "choices": [
            ("Up and down", wanted.address(only=None), len(wanted.directions) == 2),
            ("Upstream only", wanted.address(only=UP), wanted.directions == (UP,)),
            ("Downstream only", wanted.address(only=DOWN), wanted.directions == (DOWN,)),
        ],
    }
    return View("lineage.html", f"Lineage of {found.kind} {digest[:12]}", hood.document(), more)
