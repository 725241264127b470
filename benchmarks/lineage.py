"""How long it takes to ask what made a checkpoint, and what came of it, among many.

    python benchmarks/lineage.py [--artifacts 100000] [--record]

The registry holds projects like each other (`many`), each with fourteen drafts, as of a search over
learning rates. `up` and `down` are asked of drafts, `down` also of sources, where the most comes of
one thing. Each figure is the slowest of many, with the median beside it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from common import Figures, parser
from many import seed

from kimi_eagle.registry.store import Registry


def main() -> None:
    options = parser("Ask for lineages in a registry of many artifacts.")
    options.add_argument("--artifacts", type=int, default=100_000, metavar="N")
    options.add_argument("--queries", type=int, default=200, metavar="N")
    given = options.parse_args()
    figures = Figures(given)
    with tempfile.TemporaryDirectory(prefix="lineage-") as folder:
        made = seed(Path(folder), artifacts=given.artifacts)
        registry = Registry(Path(folder), create=False)
        pick = random.Random(0)
        for name, among, up in (
            ("up", made.drafts, True),
            ("down", made.drafts, False),
            ("down_source", made.sources, False),
        ):
            taken, nodes = [], 0
            for digest in pick.sample(among, min(given.queries, len(among))):
                started = time.perf_counter()
                found, _ = registry.lineage(digest, up=up, down=not up)
                taken.append((time.perf_counter() - started) * 1000)
                nodes = max(nodes, len(found))
            figures.emit(
                f"lineage_{name}",
                max(taken),
                "ms",
                median=round(statistics.median(taken), 3),
                nodes=nodes,
                artifacts=made.artifacts,
            )
        registry.close()


if __name__ == "__main__":
    main()
