"""A registry of many runs and artifacts, filled in one transaction, without anything on disk.

It holds projects like each other: three sources become rows, rows become states and a draft
vocabulary, these and the head train drafts, each evaluated and exported; all of one verifier of
forty files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_eagle.identity import digest_document
from kimi_eagle.registry.store import Registry

DRAFTS = 14
SHARDS = 40
MOMENT = "2026-01-01T00:00:00.000000Z"
# One run in ten did not come to a good end.
STATUSES = (*["done"] * 9, "failed")
INSERT = "insert into {} ({}) values ({})"


@dataclass(frozen=True)
class Seeded:
    """What a registry was filled with."""

    runs: list[str]
    drafts: list[str]
    sources: list[str]
    verifier: str
    artifacts: int


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
        document = {
            "kind": kind,
            "code_version": 1,
            "parameters": {"seed": 0},
            "inputs": {role: [digest] for role, digest in inputs.items()},
        }
        self.add(
            "executions",
            id=self._executions,
            run_id=run,
            stage=kind,
            kind=kind,
            key=digest_document("benchmark/1", ["key", output]),
            document=json.dumps(document),
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


def seed(
    root: Path,
    *,
    artifacts: int = 0,
    runs: int = 0,
    drafts: Callable[[int], int] = lambda _: DRAFTS,
) -> Seeded:
    """Fill a registry until it has so many artifacts and runs.

    Args:
        drafts: how many the run with a number trains.
    """
    registry = Registry(root)
    rows = Rows()
    made = Seeded([], [], [], rows.artifact("verifier", "verifier", "external"), 0)
    _run(rows, "verifier", 0)
    for number in range(SHARDS):
        shard = rows.artifact(f"shard {number}", "file", "external")
        rows.add(
            "artifact_members", parent=made.verifier, path=f"{number}.safetensors", child=shard
        )
    head = rows.artifact("head", "head")
    rows.stage("verifier", "head", head, verifier=made.verifier)
    number = 1
    while len(rows.tables["artifacts"]) < artifacts or number < runs:
        made.runs.append(f"{number:012x}")
        _project(rows, number, head, drafts(number), made)
        number += 1
    with registry.database.write() as connection:
        for table, items in rows.tables.items():
            names = list(items[0])
            statement = INSERT.format(table, ",".join(names), ",".join("?" * len(names)))
            connection.executemany(statement, [tuple(item.values()) for item in items])
    registry.close()
    return replace(made, artifacts=len(rows.tables["artifacts"]))


def _project(rows: Rows, number: int, head: str, drafts: int, made: Seeded) -> None:
    run = made.runs[-1]
    _run(rows, run, number)
    given = [rows.artifact(f"{run} source {n}", "source", "external") for n in range(3)]
    made.sources.extend(given)
    table = rows.artifact(f"{run} rows", "rows")
    rows.stage(run, "prepare", table, **{f"sources.{n}": digest for n, digest in enumerate(given)})
    states = rows.artifact(f"{run} states", "states")
    rows.stage(run, "extract", states, rows=table, verifier=made.verifier)
    vocab = rows.artifact(f"{run} vocab", "vocab")
    rows.stage(run, "vocab", vocab, rows=table)
    for item in range(drafts):
        draft = rows.artifact(f"{run} draft {item}", "checkpoint")
        rows.stage(run, "train", draft, states=states, vocab=vocab, head=head, rows=table)
        made.drafts.append(draft)
        for kind in ("evaluate", "export"):
            output = rows.artifact(f"{run} {kind} {item}", kind)
            rows.stage(run, kind, output, checkpoint=draft, verifier=made.verifier)


def _run(rows: Rows, run: str, number: int) -> None:
    rows.add(
        "runs",
        id=run,
        seq=number,
        name=f"project-{number % 100}",
        kind="submit",
        status=STATUSES[number % len(STATUSES)],
        manifest_digest="0" * 64,
        manifest_path="manifest.yaml",
        manifest_text="",
        resolved=json.dumps({"stages": {}}),
        overrides="[]",
        environment="{}",
        started_at=MOMENT,
        host="here",
        pid=1,
    )
