"""How long it takes to ask what made a checkpoint, and what came of it, among many.

    python benchmarks/lineage.py [--artifacts 100000] [--record]

The registry holds projects like each other: three sources become rows, rows become states and a
draft vocabulary, these and the head train fourteen drafts (as of a search over learning rates),
each evaluated and exported; all of one verifier of forty files. `up` and `down` are asked of
drafts, `down` also of sources, where the most comes of one thing. Each figure is the slowest of
many, with the median beside it.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Figures, parser

from kimi_eagle.identity import digest_document
from kimi_eagle.registry.store import Registry

DRAFTS = 14
SHARDS = 40
MOMENT = "2026-01-01T00:00:00.000000Z"
INSERT = "insert into {} ({}) values ({})"


def main() -> None:
    options = parser("Ask for lineages in a registry of many artifacts.")
    options.add_argument("--artifacts", type=int, default=100_000, metavar="N")
    options.add_argument("--queries", type=int, default=200, metavar="N")
    given = options.parse_args()
    figures = Figures(given)
    with tempfile.TemporaryDirectory(prefix="lineage-") as folder:
        drafts, sources, count = _seed(Path(folder), given.artifacts)
        registry = Registry(Path(folder), create=False)
        pick = random.Random(0)
        for name, among, up in (
            ("up", drafts, True),
            ("down", drafts, False),
            ("down_source", sources, False),
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
                artifacts=count,
            )
        registry.close()


class Rows:
    """Rows for every table, and the names of things as digests."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self._executions = 0

    def add(self, table: str, **values: Any) -> None:
        self.tables.setdefault(table, []).append(values)

    def artifact(self, name: str, kind: str, state: str = "present") -> str:
        digest = digest_document("benchmark/1", name)
        self.add(
            "artifacts",
            digest=digest,
            kind=kind,
            bytes=1,
            files="{}",
            label=name,
            state=state,
            created_at=MOMENT,
        )
        return digest

    def stage(self, run: str, kind: str, output: str, **inputs: str) -> None:
        self._executions += 1
        self.add(
            "executions",
            id=self._executions,
            run_id=run,
            stage=kind,
            kind=kind,
            key=digest_document("benchmark/1", ["key", output]),
            document=json.dumps({"kind": kind, "parameters": {"seed": 0}}),
            disposition="executed",
            metrics="{}",
            resources="{}",
            environment="{}",
            started_at=MOMENT,
        )
        for role, digest in inputs.items():
            self.add(
                "execution_inputs",
                execution=self._executions,
                role=role,
                position=0,
                digest=digest,
            )
        self.add("execution_outputs", execution=self._executions, role=kind, digest=output)


def _seed(root: Path, count: int) -> tuple[list[str], list[str], int]:
    """Fill a registry in one transaction; returns its drafts and sources, and how many artifacts
    it holds."""
    registry = Registry(root)
    rows = Rows()
    drafts: list[str] = []
    sources: list[str] = []
    _run(rows, "verifier", 0)
    verifier = rows.artifact("verifier", "verifier", "external")
    for number in range(SHARDS):
        shard = rows.artifact(f"shard {number}", "file", "external")
        rows.add("artifact_members", parent=verifier, path=f"{number}.safetensors", child=shard)
    head = rows.artifact("head", "head")
    rows.stage("verifier", "head", head, verifier=verifier)
    number = 0
    while len(rows.tables["artifacts"]) < count:
        number += 1
        _project(rows, f"p{number:05d}", number, verifier, head, drafts, sources)
    with registry.database.write() as connection:
        for table, items in rows.tables.items():
            names = list(items[0])
            statement = INSERT.format(table, ",".join(names), ",".join("?" * len(names)))
            connection.executemany(statement, [tuple(item.values()) for item in items])
    registry.close()
    return drafts, sources, len(rows.tables["artifacts"])


def _project(
    rows: Rows,
    run: str,
    number: int,
    verifier: str,
    head: str,
    drafts: list[str],
    sources: list[str],
) -> None:
    _run(rows, run, number)
    given = [rows.artifact(f"{run} source {n}", "source", "external") for n in range(3)]
    sources += given
    table = rows.artifact(f"{run} rows", "rows")
    rows.stage(run, "prepare", table, **{f"sources.{n}": digest for n, digest in enumerate(given)})
    states = rows.artifact(f"{run} states", "states")
    rows.stage(run, "extract", states, rows=table, verifier=verifier)
    vocab = rows.artifact(f"{run} vocab", "vocab")
    rows.stage(run, "vocab", vocab, rows=table)
    for item in range(DRAFTS):
        draft = rows.artifact(f"{run} draft {item}", "checkpoint")
        rows.stage(run, "train", draft, states=states, vocab=vocab, head=head, rows=table)
        drafts.append(draft)
        for kind in ("evaluate", "export"):
            made = rows.artifact(f"{run} {kind} {item}", kind)
            rows.stage(run, kind, made, checkpoint=draft, verifier=verifier)


def _run(rows: Rows, run: str, number: int) -> None:
    rows.add(
        "runs",
        id=run,
        seq=number,
        name="benchmark",
        kind="submit",
        status="done",
        manifest_digest="0" * 64,
        manifest_path="manifest.yaml",
        manifest_text="",
        resolved="{}",
        overrides="[]",
        environment="{}",
        started_at=MOMENT,
        host="here",
        pid=1,
    )


if __name__ == "__main__":
    main()
