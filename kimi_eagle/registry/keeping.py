"""The registry as its keepers use it: what `verify`, `gc`, `pin` and the records on disk need.

Every method is one transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.ledger import Ledger, chunks, marks

# Columns that hold JSON as text.
_EXECUTION_JSON = ("document", "metrics", "resources", "environment")


@dataclass(frozen=True)
class Pin:
    """An artifact that is kept whatever a policy says."""

    digest: str
    note: str
    created_at: str


@dataclass(frozen=True)
class Shard:
    """A shard of the state store, and which of its rows are found in it."""

    digest: str
    bytes: int
    created_at: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Making:
    """What the latest execution that made an artifact took."""

    seconds: float
    resources: Mapping[str, Any]


class Keeper:
    """A registry's books, and what its keepers change."""

    def __init__(self, registry: Ledger):
        self._database = registry.database

    # Records, as they are written beside the objects

    def run_document(self, run_id: str) -> dict[str, Any]:
        """Every column of a run, as text where it is that. Raises: LookupError."""
        with self._database.read() as connection:
            row = connection.execute("select * from runs where id = ?", (run_id,)).fetchone()
        if row is None:
            raise LookupError(f"there is no run {run_id}")
        return dict(row)

    def execution_document(self, execution: int) -> dict[str, Any]:
        """Every column of an execution, what went in and out by role, and `artifacts`: the rows of
        all of those. Raises: LookupError."""
        with self._database.read() as connection:
            row = connection.execute(
                "select * from executions where id = ?", (execution,)
            ).fetchone()
            if row is None:
                raise LookupError(f"there is no execution {execution}")
            inputs: dict[str, list[str]] = {}
            for role, digest in connection.execute(
                "select role, digest from execution_inputs where execution = ? "
                "order by role, position",
                (execution,),
            ):
                inputs.setdefault(role, []).append(digest)
            outputs: dict[str, str] = dict(
                connection.execute(
                    "select role, digest from execution_outputs where execution = ? order by role",
                    (execution,),
                ).fetchall()
            )
            digests = [digest for items in inputs.values() for digest in items]
            artifacts = list(_artifact_rows(connection, [*digests, *outputs.values()]))
        return {
            **_parsed(row, _EXECUTION_JSON),
            "inputs": inputs,
            "outputs": outputs,
            "artifacts": artifacts,
        }

    def executions_of(self, run_id: str) -> list[int]:
        """The executions of a run that are its own work, not taken from an earlier one."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select id from executions where run_id = ? and reused_from is null order by id",
                (run_id,),
            )
            return [row["id"] for row in rows]

    def reuses_of(self, run_id: str) -> list[dict[str, Any]]:
        """What a run took from earlier executions. All else of it is as of the one it names."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select id, stage, key, reused_from, seconds, started_at, ended_at from executions "
                "where run_id = ? and reused_from is not null order by id",
                (run_id,),
            )
            return [dict(row) for row in rows]

    def makers_of(self, digest: str) -> list[int]:
        """The executions that made an artifact for good, or saved it on the way."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select e.id from executions e join execution_outputs o on o.execution = e.id "
                "where o.digest = ? and e.reused_from is null "
                "and e.disposition not in ('running', 'reproduced') order by e.id",
                (digest,),
            )
            return [row["id"] for row in rows]

    # Artifacts

    def artifacts(self, where: str = "1", *values: Any) -> list[ArtifactRecord]:
        """Artifacts that a condition in SQL holds for, by digest."""
        with self._database.read() as connection:
            rows = connection.execute(
                f"select * from artifacts where {where} order by digest",  # noqa: S608
                values,
            )
            return [
                ArtifactRecord(
                    row["digest"],
                    row["kind"],
                    row["bytes"],
                    {
                        path: (entry[0], entry[1])
                        for path, entry in json.loads(row["files"]).items()
                    },
                    row["state"],
                    row["label"],
                )
                for row in rows
            ]

    def stored(self) -> list[ArtifactRecord]:
        """Every artifact that a stage made."""
        return self.artifacts("state <> 'external'")

    def outputs_of_run(self, run_id: str) -> list[str]:
        """The artifacts that a run made or reused."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select distinct o.digest from executions e join execution_outputs o "
                "on o.execution = e.id where e.run_id = ? order by o.digest",
                (run_id,),
            )
            return [row["digest"] for row in rows]

    def record_check(self, at: str, whole: Sequence[str], damaged: Sequence[str]) -> None:
        """Record what every file of some artifacts was found to be."""
        with self._database.write() as connection:
            connection.executemany(
                "update artifacts set state = 'present', verified_at = ? "
                "where digest = ? and state <> 'external'",
                [(at, digest) for digest in whole],
            )
            connection.executemany(
                "update artifacts set state = 'missing' where digest = ? and state <> 'external'",
                [(digest,) for digest in damaged],
            )

    # Pins

    def pins(self) -> dict[str, Pin]:
        with self._database.read() as connection:
            rows = connection.execute("select * from pins order by created_at")
            return {row["digest"]: Pin(*row) for row in rows}

    def pin(self, digest: str, note: str, at: str) -> None:
        with self._database.write() as connection:
            connection.execute(
                "insert into pins (digest, note, created_at) values (?, ?, ?) on conflict (digest) "
                "do update set note = excluded.note, created_at = excluded.created_at",
                (digest, note, at),
            )

    def unpin(self, digest: str) -> None:
        with self._database.write() as connection:
            connection.execute("delete from pins where digest = ?", (digest,))

    # Rows of hidden states

    def rows(self, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
        """(content digest, shard) of those rows that the state store holds, by key."""
        found: dict[str, tuple[str, str]] = {}
        with self._database.read() as connection:
            for chunk in chunks(list(keys)):
                for row in connection.execute(
                    "select key, digest, shard from state_rows "  # noqa: S608
                    f"where key in ({marks(chunk)})",
                    chunk,
                ):
                    found[row["key"]] = (row["digest"], row["shard"])
        return found

    def shards(self) -> list[Shard]:
        """Every shard that rows are found in, oldest first."""
        with self._database.read() as connection:
            keys: dict[str, list[str]] = {}
            for key, shard in connection.execute("select key, shard from state_rows"):
                keys.setdefault(shard, []).append(key)
            rows = connection.execute(
                "select digest, bytes, created_at from state_shards order by created_at, digest"
            )
            return [
                Shard(digest, size, created_at, tuple(keys.get(digest, ())))
                for digest, size, created_at in rows
            ]

    # What a policy asks

    def last_used(self) -> dict[str, str]:
        """When each artifact was last made, reused or taken in."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select digest, max(at) from ("
                " select o.digest as digest, coalesce(e.ended_at, e.started_at) as at"
                " from execution_outputs o join executions e on e.id = o.execution"
                " union all"
                " select i.digest, coalesce(e.ended_at, e.started_at)"
                " from execution_inputs i join executions e on e.id = i.execution"
                ") group by digest"
            )
            return dict(rows.fetchall())

    def makings(self) -> dict[str, Making]:
        """For each artifact that has a recipe, what its latest making took."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select o.digest, e.seconds, e.resources from execution_outputs o "
                "join executions e on e.id = o.execution "
                "where (e.disposition = 'executed' or o.role like 'snapshot@%') "
                "and e.key is not null order by e.id"
            )
            return {
                digest: Making(seconds or 0.0, json.loads(resources))
                for digest, seconds, resources in rows
            }

    def of_last_runs(self, count: int) -> tuple[set[str], str | None]:
        """What the last `count` runs made or reused, and when the first of them started."""
        with self._database.read() as connection:
            last = connection.execute(
                "select id, started_at from runs order by seq desc limit ?", (count,)
            ).fetchall()
            found: set[str] = set()
            for run in last:
                found.update(_outputs(connection, run["id"]))
        return found, last[-1]["started_at"] if last else None

    def descendants(self, digests: Collection[str]) -> set[str]:
        """All that was made of some artifacts, and they themselves."""
        found, frontier = set(digests), list(digests)
        with self._database.read() as connection:
            while frontier:
                reached: set[str] = set()
                for chunk in chunks(frontier):
                    reached.update(
                        row[0]
                        for row in connection.execute(
                            "select distinct o.digest from execution_inputs i "  # noqa: S608
                            "join execution_outputs o on o.execution = i.execution "
                            f"where i.digest in ({marks(chunk)})",
                            chunk,
                        )
                    )
                frontier = sorted(reached - found)
                found |= reached
        return found

    def held_by(self, runs: Collection[str]) -> set[str]:
        """What some runs have taken, made or reused so far."""
        with self._database.read() as connection:
            return _held(connection, runs)

    def evict(
        self,
        artifacts: Collection[str],
        shards: Collection[str],
        alive: Callable[[], Collection[str]],
        before: Callable[[Sequence[str]], None],
    ) -> tuple[set[str], set[str]]:
        """Take artifacts and shards out of use; returns those that were.

        `alive` names the runs that live: what one of them holds stays, and so does every shard
        while one extracts, since it counts on the rows it found. `before` is told what goes, just
        before it is recorded. After this, the files may be deleted.
        """
        with self._database.write() as connection:
            living = alive()
            going = set(artifacts) - _held(connection, living)
            leaving = set() if _extracting(connection, living) else set(shards)
            before(sorted(going))
            connection.executemany(
                "update artifacts set state = 'evicted' where digest = ?",
                [(digest,) for digest in sorted(going)],
            )
            for table, column in (("state_rows", "shard"), ("state_shards", "digest")):
                connection.executemany(
                    f"delete from {table} where {column} = ?",  # noqa: S608
                    [(digest,) for digest in sorted(leaving)],
                )
        return going, leaving

    def run_ids(self) -> set[str]:
        with self._database.read() as connection:
            return {row["id"] for row in connection.execute("select id from runs")}


def _parsed(row: sqlite3.Row, columns: Sequence[str]) -> dict[str, Any]:
    found = dict(row)
    for column in columns:
        if found[column] is not None:
            found[column] = json.loads(found[column])
    return found


def _artifact_rows(
    connection: sqlite3.Connection, digests: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What is known of some artifacts from the first, members before the folders they are in."""
    seen: set[str] = set()

    def rows(digest: str) -> Iterator[dict[str, Any]]:
        if digest in seen:
            return
        seen.add(digest)
        members = dict(
            connection.execute(
                "select path, child from artifact_members where parent = ? order by path", (digest,)
            ).fetchall()
        )
        for child in members.values():
            yield from rows(child)
        row = connection.execute(
            "select digest, kind, bytes, files, label, state, created_at from artifacts "
            "where digest = ?",
            (digest,),
        ).fetchone()
        found = _parsed(row, ("files",))
        external = found.pop("state") == "external"
        yield {**found, "external": external, "members": members}

    for digest in digests:
        yield from rows(digest)


def _outputs(connection: sqlite3.Connection, run_id: str) -> set[str]:
    rows = connection.execute(
        "select o.digest from executions e join execution_outputs o on o.execution = e.id "
        "where e.run_id = ?",
        (run_id,),
    )
    return {row["digest"] for row in rows}


def _held(connection: sqlite3.Connection, runs: Collection[str]) -> set[str]:
    found: set[str] = set()
    for run_id in runs:
        found |= _outputs(connection, run_id)
        rows = connection.execute(
            "select i.digest from executions e join execution_inputs i on i.execution = e.id "
            "where e.run_id = ?",
            (run_id,),
        )
        found.update(row["digest"] for row in rows)
    return found


def _extracting(connection: sqlite3.Connection, runs: Collection[str]) -> bool:
    return any(
        connection.execute(
            "select 1 from executions where run_id = ? and kind in ('extract', 'import_states') "
            "and disposition = 'running'",
            (run_id,),
        ).fetchone()
        for run_id in runs
    )
