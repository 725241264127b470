"""The registry as people ask it: runs, hashes, lineage. Every method is one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, literal, select
from sqlalchemy.engine import Engine

from kimi_eagle.identity import MINIMUM_PREFIX
from kimi_eagle.records import Edge, ExecutionRecord, Node, RunRecord
from kimi_eagle.registry.engine import engine_of, told
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.tables import (
    artifact_members,
    artifacts,
    execution_inputs,
    execution_outputs,
    executions,
    runs,
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


class Registry(Ledger):
    """The run registry under one root: the ledger of runs, and what is asked of it."""

    @cached_property
    def _engine(self) -> Engine:
        return engine_of(self._database)

    def close(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.dispose()
        super().close()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with told(self._database), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with (
            told(self._database),
            self._engine.connect().execution_options(read_only=True) as connection,
        ):
            yield connection

    # Runs

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

    # Artifacts

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

def _chunks(items: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _run(row: Any) -> RunRecord:
    fields = RunRecord.__dataclass_fields__
    return RunRecord(**{name: row[name] for name in fields})


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
