"""The registry as a run uses it: what was made, what is being made. Every method is one
transaction.

Plain SQL through the standard library's driver: a run of a thousand unchanged stages asks some
thousands of questions, and to load SQLAlchemy alone would take as long as to answer them.
`store.Registry` is this and what people ask.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kimi_eagle.clock import now
from kimi_eagle.records import SNAPSHOT_ROLE, ArtifactRecord, ExecutionRecord, ShardRecord
from kimi_eagle.registry.schema import Database, journal_mode, open_database

Inputs = Mapping[str, Sequence[ArtifactRecord | str]]
"""Role → what went in: a digest, or the record of what comes from outside."""


@dataclass(frozen=True)
class Reuse:
    """A stage whose outputs a run takes from an earlier execution."""

    stage: str
    made: ExecutionRecord
    inputs: Inputs


class Ledger:
    """The run registry under one root."""

    def __init__(self, root: Path, *, create: bool = True):
        """Raises: RegistryError, see `schema.open_database`."""
        self.root = root
        self._database = open_database(root, create=create)

    @property
    def database(self) -> Database:
        return self._database

    @property
    def journal_mode(self) -> str:
        """How SQLite keeps its journal here: WAL, or DELETE on a network file system."""
        return journal_mode(self.root)

    def close(self) -> None:
        self._database.close()

    # Runs

    def begin_run(self, run_id: str, *, kind: str = "submit", **values: Any) -> None:
        columns = {"id": run_id, "kind": kind, "status": "running", "started_at": now(), **values}
        with self._database.write() as connection:
            (last,) = connection.execute("select coalesce(max(seq), 0) from runs").fetchone()
            _insert(connection, "runs", {**columns, "seq": last + 1})

    def end_run(self, run_id: str, status: str) -> None:
        with self._database.write() as connection:
            connection.execute(
                # Who finds a run dead may have looked just before it ended.
                "update runs set status = ?, ended_at = ? where id = ? and status = 'running'",
                (status, now(), run_id),
            )

    def take_over(self, run_id: str, host: str, pid: int) -> None:
        """Record who runs a run from now on."""
        with self._database.write() as connection:
            connection.execute(
                "update runs set host = ?, pid = ? where id = ?", (host, pid, run_id)
            )

    def running_runs(self) -> list[str]:
        """The ids of runs that have no end, be they alive or not."""
        with self._database.read() as connection:
            rows = connection.execute("select id from runs where status = 'running' order by seq")
            return [row["id"] for row in rows]

    # Executions

    def made_by_key(self, key: str) -> ExecutionRecord | None:
        """The latest execution that carried this key to its end."""
        return self._latest("key = ?", key)

    def latest_of(self, kind: str, stage: str) -> ExecutionRecord | None:
        """The latest execution of a kind that came to its end, by the same name if there is one."""
        by_name = self._latest("kind = ? and stage = ?", kind, stage)
        return by_name or self._latest("kind = ?", kind)

    def _latest(self, which: str, *values: str) -> ExecutionRecord | None:
        rows = self._database.ask(
            f"select {EXECUTION} from executions "  # noqa: S608
            f"where {which} and disposition = 'executed' order by id desc limit 1",
            values,
        )
        return execution_record(rows[0]) if rows else None

    def last_of(
        self, kind: str, count: int = 20
    ) -> list[tuple[str, Mapping[str, Any], float, Mapping[str, list[str]]]]:
        """(run, metrics, seconds, inputs by role) of the last executions of a kind that came to
        their end."""
        rows = self._database.ask(
            "select run_id, metrics, seconds, document from executions where kind = ? "
            "and disposition = 'executed' and seconds > 0 and document is not null "
            "order by id desc limit ?",
            (kind, count),
        )
        return [
            (
                row["run_id"],
                json.loads(row["metrics"]),
                row["seconds"],
                json.loads(row["document"])["inputs"],
            )
            for row in rows
        ]

    def under_way(self, run_id: str, stage: str, key: str) -> int | None:
        """A run's execution of a stage that has not ended: begun by a coordinator that is gone."""
        rows = self._database.ask(
            "select id from executions where run_id = ? and stage = ? and key = ? "
            "and disposition = 'running'",
            (run_id, stage, key),
        )
        return rows[0]["id"] if rows else None

    def begin_execution(
        self,
        run_id: str,
        stage: str,
        kind: str,
        key: str,
        document: Mapping[str, Any],
        inputs: Inputs,
        members: Sequence[ArtifactRecord],
        attempt: str,
        environment: Mapping[str, Any],
    ) -> int:
        """Record that a stage starts; returns the execution's id.

        `members` are the files of pinned folders, which the folders' records point to.
        """
        with self._database.write() as connection:
            _put_artifacts(connection, [*members, *_records(inputs)])
            execution = _insert(
                connection,
                "executions",
                {
                    "run_id": run_id,
                    "stage": stage,
                    "kind": kind,
                    "key": key,
                    "document": json.dumps(document),
                    "disposition": "running",
                    "attempt": attempt,
                    "metrics": "{}",
                    "resources": "{}",
                    "environment": json.dumps(environment),
                    "started_at": now(),
                },
            )
            _put_inputs(connection, [(execution, inputs)])
            return execution

    def end_execution(
        self,
        execution: int,
        disposition: str,
        *,
        seconds: float,
        outputs: Mapping[str, ArtifactRecord] | None = None,
        metrics: Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        """Record how a stage ended: its outputs become known in the same transaction."""
        outputs = outputs or {}
        with self._database.write() as connection:
            _put_artifacts(connection, outputs.values())
            connection.execute(
                "update executions set disposition = ?, seconds = ?, ended_at = ?, error = ?, "
                "metrics = ?, resources = ? where id = ?",
                (
                    disposition,
                    seconds,
                    now(),
                    error,
                    json.dumps(metrics or {}),
                    json.dumps(resources or {}),
                    execution,
                ),
            )
            digests = {role: artifact.digest for role, artifact in outputs.items()}
            _put_outputs(connection, [(execution, digests)])

    def reuse_executions(
        self, run_id: str, reused: Sequence[Reuse], members: Sequence[ArtifactRecord]
    ) -> None:
        """Record what a run took from earlier executions, all of it or nothing.

        `members` are the files of pinned folders, which the folders' records point to.
        """
        if not reused:
            return
        pinned = [record for item in reused for record in _records(item.inputs)]
        with self._database.write() as connection:
            # Most of them share what they take in: each is written once.
            _put_artifacts(connection, {r.digest: r for r in [*members, *pinned]}.values())
            (last,) = connection.execute("select coalesce(max(id), 0) from executions").fetchone()
            numbered = list(enumerate(reused, last + 1))
            moment = now()
            connection.executemany(
                "insert into executions (id, run_id, stage, kind, key, disposition, reused_from, "
                "metrics, resources, environment, seconds, started_at, ended_at) "
                "values (?, ?, ?, ?, ?, 'reused', ?, '{}', '{}', '{}', 0.0, ?, ?)",
                [
                    (
                        id_,
                        run_id,
                        item.stage,
                        item.made.kind,
                        item.made.key,
                        item.made.id,
                        moment,
                        moment,
                    )
                    for id_, item in numbered
                ],
            )
            _put_inputs(connection, ((id_, item.inputs) for id_, item in numbered))
            _put_outputs(connection, ((id_, item.made.outputs) for id_, item in numbered))

    def add_output(self, execution: int, role: str, record: ArtifactRecord) -> None:
        """Make something known that an execution under way has made."""
        with self._database.write() as connection:
            _put_artifacts(connection, [record])
            _put_outputs(connection, [(execution, {role: record.digest})])

    def snapshots(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(digest, key document of the execution that saved it) of what trainings saved on their
        way and is in the store, newest first."""
        rows = self._database.ask(
            "select o.digest, e.document from execution_outputs o "
            "join executions e on e.id = o.execution join artifacts a on a.digest = o.digest "
            "where o.role like ? and a.state = 'present' and e.document is not null "
            "order by e.id desc",
            (f"{SNAPSHOT_ROLE}%",),
        )
        return [(row["digest"], json.loads(row["document"])) for row in rows]

    def abandon_running(self, run_id: str, disposition: str) -> None:
        """Give a run's executions that never ended their end."""
        with self._database.write() as connection:
            connection.execute(
                "update executions set disposition = ?, ended_at = ? "
                "where run_id = ? and disposition = 'running'",
                (disposition, now(), run_id),
            )

    # Artifacts

    def artifact(self, digest: str) -> ArtifactRecord | None:
        rows = self._database.ask(
            "select *, (select json_group_object(path, child) from artifact_members "
            "where parent = digest) as members from artifacts where digest = ?",
            (digest,),
        )
        return _artifact(rows[0]) if rows else None

    def artifacts_starting(self, prefix: str) -> list[ArtifactRecord]:
        """The artifacts whose hash starts so."""
        rows = self._database.ask(
            "select digest from artifacts where digest >= ? and digest < ? limit 50",
            (prefix, prefix + "\x7f"),
        )
        found = [self.artifact(row["digest"]) for row in rows]
        return [record for record in found if record is not None]

    def set_state(self, digest: str, state: str) -> None:
        with self._database.write() as connection:
            connection.execute("update artifacts set state = ? where digest = ?", (state, digest))

    # Files

    def file_stats(self) -> dict[str, tuple[tuple[int, int, int, int, int], str]]:
        """(stat, digest) of every file as it was last read, by absolute path; the stat is
        (device, inode, size, mtime_ns, ctime_ns)."""
        with self._database.read() as connection:
            rows = connection.execute(
                "select path, device, inode, size, mtime_ns, ctime_ns, digest from file_stats"
            )
            return {row[0]: ((row[1], row[2], row[3], row[4], row[5]), row[6]) for row in rows}

    def put_file_stats(
        self, stats: Mapping[str, tuple[tuple[int, int, int, int, int], str]]
    ) -> None:
        if not stats:
            return
        with self._database.write() as connection:
            connection.executemany(
                "insert or replace into file_stats "
                "(path, device, inode, size, mtime_ns, ctime_ns, digest) "
                "values (?, ?, ?, ?, ?, ?, ?)",
                [(path, *stat, digest) for path, (stat, digest) in stats.items()],
            )

    # Hidden states

    def add_shard(self, shard: ShardRecord, created_at: str | None = None) -> None:
        """Make a published shard's rows findable; a row that is already held keeps its place."""
        with self._database.write() as connection:
            connection.execute(
                "insert into state_shards (digest, bytes, rows, tokens, created_at) "
                "values (?, ?, ?, ?, ?) on conflict do nothing",
                (
                    shard.digest,
                    shard.bytes,
                    len(shard.rows),
                    sum(row[2] for row in shard.rows),
                    created_at or now(),
                ),
            )
            connection.executemany(
                "insert into state_rows (key, shard, start, tokens, digest) "
                "values (?, ?, ?, ?, ?) on conflict do nothing",
                [(key, shard.digest, start, n, digest) for key, start, n, digest in shard.rows],
            )

    def drop_shard(self, digest: str) -> None:
        """Forget a shard that is gone: its rows are to be extracted again."""
        with self._database.write() as connection:
            connection.execute("delete from state_rows where shard = ?", (digest,))
            connection.execute("delete from state_shards where digest = ?", (digest,))

    def shards(self) -> list[tuple[str, int]]:
        """(digest, bytes) of every shard that rows are found in."""
        with self._database.read() as connection:
            rows = connection.execute("select digest, bytes from state_shards")
            return [(row["digest"], row["bytes"]) for row in rows]

    def copy_state_rows(self, path: Path) -> None:
        """Write where rows of hidden states lie into a database of its own, for readers on other
        machines."""
        with closing(sqlite3.connect(path)) as copy, copy:
            copy.execute("pragma journal_mode = off")
            copy.execute(
                "create table state_rows (key text primary key, shard text, start integer, "
                "tokens integer, digest text) without rowid"
            )
            with self._database.read() as connection:
                rows = connection.execute(
                    "select key, shard, start, tokens, digest from state_rows"
                )
                copy.executemany("insert into state_rows values (?, ?, ?, ?, ?)", map(tuple, rows))

    def missing_rows(self, keys: Sequence[str]) -> set[str]:
        """Which of these row keys the state store lacks."""
        missing = set(keys)
        with self._database.read() as connection:
            for chunk in chunks(keys):
                rows = connection.execute(
                    f"select key from state_rows where key in ({marks(chunk)})",  # noqa: S608
                    chunk,
                )
                missing.difference_update(row["key"] for row in rows)
        return missing


def chunks(items: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    """Parts of a list that one statement can name."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def marks(items: Sequence[str]) -> str:
    """As many placeholders as there are items."""
    return ",".join("?" * len(items))


def _insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
    """Insert a row; returns its rowid."""
    cursor = connection.execute(
        f"insert into {table} ({','.join(values)}) "  # noqa: S608
        f"values ({','.join(':' + name for name in values)})",
        values,
    )
    return int(cursor.lastrowid or 0)


def _put_artifacts(connection: sqlite3.Connection, records: Iterable[ArtifactRecord]) -> None:
    """Make artifacts known; one that was evicted or missing and is back is present again."""
    for record in records:
        connection.execute(
            "insert into artifacts (digest, kind, bytes, files, label, state, created_at) "
            "values (?, ?, ?, ?, ?, ?, ?) "
            "on conflict (digest) do update set state = excluded.state",
            (
                record.digest,
                record.kind,
                record.bytes,
                json.dumps(record.files),
                record.label,
                record.state,
                now(),
            ),
        )
        connection.executemany(
            "insert into artifact_members (parent, path, child) values (?, ?, ?) "
            "on conflict do nothing",
            [(record.digest, path, child) for path, child in record.members.items()],
        )


def _put_inputs(connection: sqlite3.Connection, executions: Iterable[tuple[int, Inputs]]) -> None:
    connection.executemany(
        "insert into execution_inputs (execution, role, position, digest) values (?, ?, ?, ?)",
        [
            (execution, role, position, item if isinstance(item, str) else item.digest)
            for execution, inputs in executions
            for role, items in inputs.items()
            for position, item in enumerate(items)
        ],
    )


def _put_outputs(
    connection: sqlite3.Connection, executions: Iterable[tuple[int, Mapping[str, str]]]
) -> None:
    connection.executemany(
        "insert into execution_outputs (execution, role, digest) values (?, ?, ?)",
        [
            (execution, role, digest)
            for execution, outputs in executions
            for role, digest in outputs.items()
        ],
    )


def _records(inputs: Inputs) -> list[ArtifactRecord]:
    return [item for items in inputs.values() for item in items if isinstance(item, ArtifactRecord)]


def _artifact(row: sqlite3.Row) -> ArtifactRecord:
    return ArtifactRecord(
        row["digest"],
        row["kind"],
        row["bytes"],
        {path: (digest, size) for path, (digest, size) in json.loads(row["files"]).items()},
        row["state"],
        row["label"],
        json.loads(row["members"]),
    )


def _as_made(column: str) -> str:
    return (
        f"case when reused_from is null then {column} else (select made.{column} "  # noqa: S608
        f"from executions made where made.id = executions.reused_from) end as {column}"
    )


# The columns of an execution, its outputs among them. What is as of the execution that was reused
# is kept there alone: else a run of a thousand unchanged stages would write megabytes.
EXECUTION = (
    "id, run_id, stage, kind, key, disposition, reused_from, resources, error, seconds, "  # noqa: S608
    f"started_at, ended_at, {_as_made('document')}, {_as_made('metrics')}, "
    f"{_as_made('environment')}, (select json_group_object(role, digest) from execution_outputs "
    f"where execution = executions.id and role not like '{SNAPSHOT_ROLE}%') as outputs"
)


def execution_record(row: sqlite3.Row) -> ExecutionRecord:
    """A row of `EXECUTION` as a record."""
    return ExecutionRecord(
        id=row["id"],
        run_id=row["run_id"],
        stage=row["stage"],
        kind=row["kind"],
        key=row["key"],
        document=json.loads(row["document"]) if row["document"] else None,
        disposition=row["disposition"],
        reused_from=row["reused_from"],
        metrics=json.loads(row["metrics"]),
        resources=json.loads(row["resources"]),
        environment=_environment(row["environment"]),
        error=row["error"],
        seconds=row["seconds"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        outputs=json.loads(row["outputs"]),
    )


@cache
def _environment(text: str) -> Mapping[str, Any]:
    """An environment as recorded: thousands of executions share one, and its parsed form."""
    return dict(json.loads(text))
