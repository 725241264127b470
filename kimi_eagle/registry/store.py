"""The registry as people ask it: runs, hashes, lineage. Every method is one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence

from kimi_eagle.identity import MINIMUM_PREFIX
from kimi_eagle.records import Edge, ExecutionRecord, Node, RunRecord
from kimi_eagle.registry.ledger import EXECUTION, Ledger, chunks, execution_record, marks


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

    # Runs

    def list_runs(self, limit: int | None = None) -> list[RunRecord]:
        """Runs, newest first."""
        with self.database.read() as connection:
            rows = connection.execute(
                f"select {_RUN} from runs order by seq desc limit ?",  # noqa: S608
                (-1 if limit is None else limit,),
            )
            return [RunRecord(*row) for row in rows]

    def run(self, run_id: str) -> RunRecord | None:
        with self.database.read() as connection:
            row = connection.execute(
                f"select {_RUN} from runs where id = ?",  # noqa: S608
                (run_id,),
            ).fetchone()
            return RunRecord(*row) if row else None

    def run_texts(self, run_id: str) -> Mapping[str, str]:
        """A run's manifest as submitted and as resolved, its overrides and environment."""
        with self.database.read() as connection:
            row = connection.execute(
                "select manifest_text, resolved, overrides, environment from runs where id = ?",
                (run_id,),
            ).fetchone()
            return dict(row)

    def stages_of(self, run_id: str) -> list[ExecutionRecord]:
        return self._executions("where run_id = ? order by id", run_id)

    def execution(self, number: int) -> ExecutionRecord:
        """An execution by its number. Raises: LookupError."""
        found = self._executions("where id = ?", number)
        if not found:
            raise LookupError(f"there is no execution {number}")
        return found[0]

    # Artifacts

    def producers(self, digest: str, *, reproduced: bool = False) -> list[ExecutionRecord]:
        """The executions that made an artifact, oldest first; also those that made it again to
        compare it, when asked for."""
        dispositions = ("executed", "reproduced") if reproduced else ("executed",)
        return self._executions(
            f"where disposition in ({marks(dispositions)}) "  # noqa: S608
            "and id in (select execution from execution_outputs where digest = ?) order by id",
            *dispositions,
            digest,
        )

    def consumers(self, digest: str) -> list[ExecutionRecord]:
        """The executions that took an artifact in, oldest first."""
        return self._executions(
            "where id in (select execution from execution_inputs where digest = ?) "
            "and disposition = 'executed' order by id",
            digest,
        )

    def _executions(self, which: str, *values: str | int) -> list[ExecutionRecord]:
        question = f"select {EXECUTION} from executions {which}"  # noqa: S608
        return [execution_record(row) for row in self.database.ask(question, values)]

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
        with self.database.read() as connection:
            for query in (
                "select id, 'run' from runs where id >= ? and id < ? limit 50",
                "select digest, kind from artifacts where digest >= ? and digest < ? limit 50",
            ):
                rows = connection.execute(query, (prefix, prefix + "\x7f"))
                found += [(row[0], row[1]) for row in rows]
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
        edges: dict[Edge, None] = {}
        seen = {digest}
        with self.database.read() as connection:
            for active, step in ((up, _edges_up), (down, _edges_down)):
                frontier = {digest} if active else set()
                visited = set(frontier)
                while frontier:
                    found = list(step(connection, frontier))
                    edges.update(dict.fromkeys(found))
                    reached = {e.source if step is _edges_up else e.target for e in found}
                    frontier = reached - visited
                    visited |= frontier
                seen |= visited
            nodes = [
                Node(*row)
                for chunk in chunks(sorted(seen))
                for row in connection.execute(
                    "select digest, kind, bytes, state, label from artifacts "  # noqa: S608
                    f"where digest in ({marks(chunk)})",
                    chunk,
                )
            ]
        return nodes, list(edges)


_RUN = ", ".join(RunRecord.__dataclass_fields__)

# Which input led to which output, by which stage, the first time or again; completed by which of
# the two is known.
LED = """
select distinct i.digest, o.digest, e.stage, i.role
from executions e
join execution_inputs i on i.execution = e.id
join execution_outputs o on o.execution = e.id
where (e.disposition in ('executed', 'reproduced') or o.role like 'snapshot@%') and """

# Which file is part of which folder; completed likewise.
MEMBERS = "select child, parent, null, path from artifact_members where "


def _edges_up(connection: sqlite3.Connection, targets: set[str]) -> Iterator[Edge]:
    """What went into each of `targets`: inputs of the executions that made it, and its members."""
    return _edges(connection, targets, LED + "o.digest", MEMBERS + "parent")


def _edges_down(connection: sqlite3.Connection, sources: set[str]) -> Iterator[Edge]:
    """What came of each of `sources`."""
    return _edges(connection, sources, LED + "i.digest", MEMBERS + "child")


def _edges(connection: sqlite3.Connection, digests: set[str], *queries: str) -> Iterator[Edge]:
    for chunk in chunks(sorted(digests)):
        for query in queries:
            rows = connection.execute(f"{query} in ({marks(chunk)})", chunk)
            yield from (Edge(*row) for row in rows)
