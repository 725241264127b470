"""Reading and writing the registry. Every method is one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, literal, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from kimi_eagle.clock import now
from kimi_eagle.identity import MINIMUM_PREFIX
from kimi_eagle.records import (
    ArtifactRecord,
    Edge,
    ExecutionRecord,
    Node,
    RunRecord,
    ShardRecord,
)
from kimi_eagle.registry.schema import FILE, journal_mode, open_database, readable
from kimi_eagle.registry.tables import (
    artifact_members,
    artifacts,
    execution_inputs,
    execution_outputs,
    executions,
    file_stats,
    runs,
    state_rows,
    state_shards,
)


class UnknownDigest(LookupError):
    """No run or artifact has this hash or prefix."""


class AmbiguousDigest(LookupError):
    """Several have it; `candidates` lists them."""

    def __init__(self, prefix: str, candidates: Sequence[tuple[str, str]]):
        self.candidates = candidates
        listed = ", ".join(f"{digest[:16]} ({kind})" for digest, kind in candidates[:8])
        super().__init__(
            f"{prefix} is the start of {len(candidates)} hashes: {listed}; give more of it"
        )


class Registry:
    """The run registry under one root."""

    def __init__(self, root: Path, *, create: bool = True):
        """Raises: RegistryError, see `schema.open_database`."""
        self.root = root
        self._engine = open_database(root, create=create)

    @property
    def journal_mode(self) -> str:
        """How SQLite keeps its journal here: WAL, or DELETE on a network file system."""
        return journal_mode(self.root)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with readable(self.root / FILE), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with (
            readable(self.root / FILE),
            self._engine.connect().execution_options(read_only=True) as connection,
        ):
            yield connection

    # Runs

    def begin_run(self, run_id: str, *, kind: str = "submit", **values: Any) -> None:
        with self._write() as connection:
            seq = connection.scalar(select(func.coalesce(func.max(runs.c.seq), 0))) or 0
            connection.execute(
                insert(runs).values(
                    id=run_id, seq=seq + 1, kind=kind, status="running", started_at=now(), **values
                )
            )

    def end_run(self, run_id: str, status: str) -> None:
        with self._write() as connection:
            connection.execute(
                update(runs).where(runs.c.id == run_id).values(status=status, ended_at=now())
            )

    def list_runs(self, limit: int | None = None) -> list[RunRecord]:
        """Runs, newest first."""
        query = select(runs).order_by(runs.c.seq.desc())
        if limit is not None:
            query = query.limit(limit)
        with self._read() as connection:
            return [_run(row) for row in connection.execute(query).mappings()]

    def run(self, run_id: str) -> RunRecord | None:
        with self._read() as connection:
            row = connection.execute(select(runs).where(runs.c.id == run_id)).mappings().first()
            return _run(row) if row else None

    def run_texts(self, run_id: str) -> Mapping[str, str]:
        """A run's manifest as submitted and as resolved, its overrides and environment."""
        columns = (runs.c.manifest_text, runs.c.resolved, runs.c.overrides, runs.c.environment)
        with self._read() as connection:
            row = connection.execute(select(*columns).where(runs.c.id == run_id)).mappings().one()
            return {key: str(value) for key, value in row.items()}

    def stages_of(self, run_id: str) -> list[ExecutionRecord]:
        with self._read() as connection:
            rows = connection.execute(
                select(executions).where(executions.c.run_id == run_id).order_by(executions.c.id)
            ).mappings()
            return [_execution(connection, row) for row in rows]

    # Executions

    def made_by_key(self, key: str) -> ExecutionRecord | None:
        """The latest execution that carried this key to its end."""
        query = (
            select(executions)
            .where(executions.c.key == key, executions.c.disposition == "executed")
            .order_by(executions.c.id.desc())
            .limit(1)
        )
        with self._read() as connection:
            row = connection.execute(query).mappings().first()
            return _execution(connection, row) if row else None

    def latest_of(self, kind: str, stage: str) -> ExecutionRecord | None:
        """The latest execution of a kind that came to its end, by the same name if there is one."""
        query = (
            select(executions)
            .where(executions.c.kind == kind, executions.c.disposition == "executed")
            .order_by((executions.c.stage == stage).desc(), executions.c.id.desc())
            .limit(1)
        )
        with self._read() as connection:
            row = connection.execute(query).mappings().first()
            return _execution(connection, row) if row else None

    def begin_execution(
        self,
        run_id: str,
        stage: str,
        kind: str,
        key: str,
        document: Mapping[str, Any],
        inputs: Mapping[str, Sequence[ArtifactRecord | str]],
        members: Sequence[ArtifactRecord],
        attempt: str,
        environment: Mapping[str, Any],
    ) -> int:
        """Record that a stage starts; returns the execution's id.

        `members` are the files of pinned folders, which the folders' records point to.
        """
        with self._write() as connection:
            _put_artifacts(connection, [*members, *_records(inputs)])
            execution = _insert_execution(
                connection,
                run_id,
                stage,
                kind,
                key,
                document,
                "running",
                attempt=attempt,
                environment=json.dumps(environment),
            )
            _put_inputs(connection, execution, inputs)
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
        with self._write() as connection:
            _put_artifacts(connection, (outputs or {}).values())
            connection.execute(
                update(executions)
                .where(executions.c.id == execution)
                .values(
                    disposition=disposition,
                    seconds=seconds,
                    ended_at=now(),
                    error=error,
                    metrics=json.dumps(metrics or {}),
                    resources=json.dumps(resources or {}),
                )
            )
            for role, artifact in (outputs or {}).items():
                connection.execute(
                    insert(execution_outputs).values(
                        execution=execution, role=role, digest=artifact.digest
                    )
                )

    def reuse_execution(
        self,
        run_id: str,
        stage: str,
        made: ExecutionRecord,
        inputs: Mapping[str, Sequence[ArtifactRecord | str]],
        members: Sequence[ArtifactRecord],
    ) -> None:
        """Record that a run took a stage's outputs from an earlier execution."""
        with self._write() as connection:
            _put_artifacts(connection, [*members, *_records(inputs)])
            execution = _insert_execution(
                connection,
                run_id,
                stage,
                made.kind,
                str(made.key),
                made.document or {},
                "reused",
                reused_from=made.id,
                environment=json.dumps(made.environment),
                metrics=json.dumps(made.metrics),
                seconds=0.0,
                ended_at=now(),
            )
            _put_inputs(connection, execution, inputs)
            for role, digest in made.outputs.items():
                connection.execute(
                    insert(execution_outputs).values(execution=execution, role=role, digest=digest)
                )

    def abandon_running(self, run_id: str, disposition: str) -> None:
        """Give a run's executions that never ended their end."""
        with self._write() as connection:
            connection.execute(
                update(executions)
                .where(executions.c.run_id == run_id, executions.c.disposition == "running")
                .values(disposition=disposition, ended_at=now())
            )

    # Artifacts

    def artifact(self, digest: str) -> ArtifactRecord | None:
        with self._read() as connection:
            row = (
                connection.execute(select(artifacts).where(artifacts.c.digest == digest))
                .mappings()
                .first()
            )
            if row is None:
                return None
            members = connection.execute(
                select(artifact_members.c.path, artifact_members.c.child).where(
                    artifact_members.c.parent == digest
                )
            )
            return _artifact(row, {row.path: row.child for row in members})

    def set_state(self, digest: str, state: str) -> None:
        with self._write() as connection:
            connection.execute(
                update(artifacts).where(artifacts.c.digest == digest).values(state=state)
            )

    def producers(self, digest: str) -> list[ExecutionRecord]:
        """The executions that made an artifact, oldest first."""
        query = (
            select(executions)
            .join(execution_outputs, execution_outputs.c.execution == executions.c.id)
            .where(execution_outputs.c.digest == digest, executions.c.disposition == "executed")
            .order_by(executions.c.id)
        )
        with self._read() as connection:
            return [_execution(connection, row) for row in connection.execute(query).mappings()]

    def consumers(self, digest: str) -> list[ExecutionRecord]:
        """The executions that took an artifact in, oldest first."""
        query = (
            select(executions)
            .join(execution_inputs, execution_inputs.c.execution == executions.c.id)
            .where(execution_inputs.c.digest == digest, executions.c.disposition == "executed")
            .order_by(executions.c.id)
            .distinct()
        )
        with self._read() as connection:
            return [_execution(connection, row) for row in connection.execute(query).mappings()]

    def resolve(self, prefix: str) -> tuple[str, str]:
        """The whole hash or run id that `prefix` starts, and what it names: `run` or a kind.

        Raises:
            UnknownDigest: nothing starts with it, or it is too short to look up.
            AmbiguousDigest: several things do.
        """
        prefix = prefix.lower()
        if len(prefix) < MINIMUM_PREFIX:
            raise UnknownDigest(
                f"{prefix!r} is too short: give at least {MINIMUM_PREFIX} characters"
            )
        found: list[tuple[str, str]] = []
        with self._read() as connection:
            for table, column, what in (
                (runs, runs.c.id, None),
                (artifacts, artifacts.c.digest, artifacts.c.kind),
            ):
                kinds = what if what is not None else literal("run")
                query = (
                    select(column, kinds)
                    .select_from(table)
                    .where(column >= prefix, column < prefix + "\x7f")
                    .limit(50)
                )
                found += [(row[0], row[1]) for row in connection.execute(query)]
        exact = [item for item in found if item[0] == prefix]
        if exact:
            return exact[0]
        if not found:
            raise UnknownDigest(f"no run or artifact starts with {prefix}")
        if len(found) > 1:
            raise AmbiguousDigest(prefix, found)
        return found[0]

    def lineage(self, digest: str, *, up: bool, down: bool) -> tuple[list[Node], list[Edge]]:
        """An artifact's ancestors, descendants, or both, with what led from one to the other."""
        edges: dict[tuple[str, str, str | None, str], Edge] = {}
        seen = {digest}
        with self._read() as connection:
            for active, step in ((up, _edges_up), (down, _edges_down)):
                frontier = {digest} if active else set()
                visited = set(frontier)
                while frontier:
                    found = list(step(connection, frontier))
                    for edge in found:
                        edges[(edge.source, edge.target, edge.stage, edge.role)] = edge
                    reached = {e.source if step is _edges_up else e.target for e in found}
                    frontier = reached - visited
                    visited |= frontier
                seen |= visited
            nodes = [
                Node(row["digest"], row["kind"], row["bytes"], row["state"], row["label"])
                for chunk in _chunks(sorted(seen))
                for row in connection.execute(
                    select(artifacts).where(artifacts.c.digest.in_(chunk))
                ).mappings()
            ]
        return nodes, list(edges.values())

    # Files

    def file_stats(self) -> dict[str, Mapping[str, Any]]:
        """What every file held when it was last read, by absolute path."""
        with self._read() as connection:
            return {
                row["path"]: dict(row) for row in connection.execute(select(file_stats)).mappings()
            }

    def put_file_stats(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        statement = upsert(file_stats)
        statement = statement.on_conflict_do_update(
            index_elements=["path"],
            set_={
                column.name: statement.excluded[column.name]
                for column in file_stats.columns
                if column.name != "path"
            },
        )
        with self._write() as connection:
            connection.execute(statement, list(rows))

    # Hidden states

    def add_shard(self, shard: ShardRecord) -> None:
        """Make a published shard's rows findable; a row that is already held keeps its place."""
        with self._write() as connection:
            connection.execute(
                upsert(state_shards)
                .values(
                    digest=shard.digest,
                    bytes=shard.bytes,
                    rows=len(shard.rows),
                    tokens=sum(row[2] for row in shard.rows),
                    created_at=now(),
                )
                .on_conflict_do_nothing()
            )
            connection.execute(
                upsert(state_rows).on_conflict_do_nothing(),
                [
                    {
                        "key": key,
                        "shard": shard.digest,
                        "start": start,
                        "tokens": tokens,
                        "digest": digest,
                    }
                    for key, start, tokens, digest in shard.rows
                ],
            )

    def drop_shard(self, digest: str) -> None:
        """Forget a shard that is gone: its rows are to be extracted again."""
        with self._write() as connection:
            connection.execute(delete(state_rows).where(state_rows.c.shard == digest))
            connection.execute(delete(state_shards).where(state_shards.c.digest == digest))

    def shards(self) -> list[tuple[str, int]]:
        """(digest, bytes) of every shard that rows are found in."""
        with self._read() as connection:
            return [
                (row[0], row[1])
                for row in connection.execute(select(state_shards.c.digest, state_shards.c.bytes))
            ]

    def missing_rows(self, keys: Sequence[str]) -> set[str]:
        """Which of these row keys the state store lacks."""
        held: set[str] = set()
        query = select(state_rows.c.key).where(
            state_rows.c.key.in_(bindparam("keys", expanding=True))
        )
        with self._read() as connection:
            for chunk in _chunks(list(keys)):
                held |= {row[0] for row in connection.execute(query, {"keys": chunk})}
        return set(keys) - held


def _chunks(items: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _run(row: Any) -> RunRecord:
    fields = RunRecord.__dataclass_fields__
    return RunRecord(**{name: row[name] for name in fields})


def _artifact(row: Any, members: Mapping[str, str]) -> ArtifactRecord:
    return ArtifactRecord(
        row["digest"],
        row["kind"],
        row["bytes"],
        {path: (digest, size) for path, (digest, size) in json.loads(row["files"]).items()},
        row["state"],
        row["label"],
        members,
    )


def _execution(connection: Connection, row: Any) -> ExecutionRecord:
    outputs = connection.execute(
        select(execution_outputs.c.role, execution_outputs.c.digest).where(
            execution_outputs.c.execution == row["id"]
        )
    )
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
        environment=json.loads(row["environment"]),
        error=row["error"],
        seconds=row["seconds"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        outputs={row.role: row.digest for row in outputs},
    )


def _records(inputs: Mapping[str, Sequence[ArtifactRecord | str]]) -> list[ArtifactRecord]:
    return [item for items in inputs.values() for item in items if isinstance(item, ArtifactRecord)]


def _put_artifacts(connection: Connection, records: Iterable[ArtifactRecord]) -> None:
    """Make artifacts known; one that was evicted or missing and is back is present again."""
    for record in records:
        values = {
            "digest": record.digest,
            "kind": record.kind,
            "bytes": record.bytes,
            "files": json.dumps(record.files),
            "label": record.label,
            "state": record.state,
            "created_at": now(),
        }
        connection.execute(
            upsert(artifacts)
            .values(values)
            .on_conflict_do_update(index_elements=["digest"], set_={"state": record.state})
        )
        for path, child in record.members.items():
            connection.execute(
                upsert(artifact_members)
                .values(parent=record.digest, path=path, child=child)
                .on_conflict_do_nothing()
            )


def _put_inputs(
    connection: Connection, execution: int, inputs: Mapping[str, Sequence[ArtifactRecord | str]]
) -> None:
    rows = [
        {
            "execution": execution,
            "role": role,
            "position": position,
            "digest": item.digest if isinstance(item, ArtifactRecord) else item,
        }
        for role, items in inputs.items()
        for position, item in enumerate(items)
    ]
    if rows:
        connection.execute(insert(execution_inputs), rows)


def _insert_execution(
    connection: Connection,
    run_id: str,
    stage: str,
    kind: str,
    key: str,
    document: Mapping[str, Any],
    disposition: str,
    **values: Any,
) -> int:
    statement = (
        insert(executions)
        .values(
            run_id=run_id,
            stage=stage,
            kind=kind,
            key=key,
            document=json.dumps(document),
            disposition=disposition,
            started_at=now(),
            **{"metrics": "{}", "resources": "{}", **values},
        )
        .returning(executions.c.id)
    )
    return int(connection.execute(statement).scalar_one())


def _edges_up(connection: Connection, targets: set[str]) -> Iterator[Edge]:
    """What went into each of `targets`: inputs of the executions that made it, and its members."""
    for chunk in _chunks(sorted(targets)):
        query = (
            select(
                execution_inputs.c.digest,
                execution_outputs.c.digest,
                executions.c.stage,
                execution_inputs.c.role,
            )
            .join(executions, executions.c.id == execution_outputs.c.execution)
            .join(execution_inputs, execution_inputs.c.execution == executions.c.id)
            .where(execution_outputs.c.digest.in_(chunk), executions.c.disposition == "executed")
            .distinct()
        )
        yield from (Edge(*row) for row in connection.execute(query))
        members = select(artifact_members).where(artifact_members.c.parent.in_(chunk))
        for row in connection.execute(members):
            yield Edge(row.child, row.parent, None, row.path)


def _edges_down(connection: Connection, sources: set[str]) -> Iterator[Edge]:
    """What came of each of `sources`."""
    for chunk in _chunks(sorted(sources)):
        query = (
            select(
                execution_inputs.c.digest,
                execution_outputs.c.digest,
                executions.c.stage,
                execution_inputs.c.role,
            )
            .join(executions, executions.c.id == execution_inputs.c.execution)
            .join(execution_outputs, execution_outputs.c.execution == executions.c.id)
            .where(execution_inputs.c.digest.in_(chunk), executions.c.disposition == "executed")
            .distinct()
        )
        yield from (Edge(*row) for row in connection.execute(query))
        members = select(artifact_members).where(artifact_members.c.child.in_(chunk))
        for row in connection.execute(members):
            yield Edge(row.child, row.parent, None, row.path)
