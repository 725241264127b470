"""What another registry says of runs and executions, taken into this one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_eagle.registry.ledger import Ledger, _insert

_JSON = ("document", "metrics", "resources", "environment")


def take_in(
    registry: Ledger, runs: Sequence[Mapping[str, Any]], executions: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[int]]:
    """Add what is not known here yet; returns the ids of the new runs and executions.

    Artifacts that this registry does not know are `evicted`: it knows how they are made, and does
    not have them. Runs keep their ids, executions are counted on.

    Args: `runs`, `executions`: as `Keeper.run_document` and `execution_document` give them.
    """
    with registry.database.write() as connection:
        begun = [str(run["id"]) for run in runs if _add_run(connection, run)]
        added = [
            number
            for document in sorted(executions, key=lambda item: str(item["started_at"]))
            if (number := _add_execution(connection, document)) is not None
        ]
    return begun, added


def _add_run(connection: sqlite3.Connection, run: Mapping[str, Any]) -> bool:
    if connection.execute("select 1 from runs where id = ?", (run["id"],)).fetchone():
        return False
    (last,) = connection.execute("select coalesce(max(seq), 0) from runs").fetchone()
    _insert(connection, "runs", {**run, "seq": last + 1})
    return True


def _add_execution(connection: sqlite3.Connection, document: Mapping[str, Any]) -> int | None:
    """Its number; None when it is known."""
    same = ("run_id", "stage", "key", "started_at")
    if connection.execute(
        "select 1 from executions where run_id = ? and stage = ? and key = ? and started_at = ?",
        [document[name] for name in same],
    ).fetchone():
        return None
    for artifact in document["artifacts"]:
        state = "external" if artifact["external"] else "evicted"
        connection.execute(
            "insert into artifacts (digest, kind, bytes, files, label, state, created_at) "
            "values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing",
            (
                artifact["digest"],
                artifact["kind"],
                artifact["bytes"],
                json.dumps(artifact["files"]),
                artifact["label"],
                state,
                artifact["created_at"],
            ),
        )
        connection.executemany(
            "insert into artifact_members (parent, path, child) values (?, ?, ?) "
            "on conflict do nothing",
            [(artifact["digest"], path, child) for path, child in artifact["members"].items()],
        )
    values = {
        name: json.dumps(value) if name in _JSON and value is not None else value
        for name, value in document.items()
        if name not in ("id", "inputs", "outputs", "artifacts")
    }
    number = _insert(connection, "executions", values)
    connection.executemany(
        "insert into execution_inputs (execution, role, position, digest) values (?, ?, ?, ?)",
        [
            (number, role, position, digest)
            for role, digests in document["inputs"].items()
            for position, digest in enumerate(digests)
        ],
    )
    connection.executemany(
        "insert into execution_outputs (execution, role, digest) values (?, ?, ?)",
        [(number, role, digest) for role, digest in document["outputs"].items()],
    )
    return number
