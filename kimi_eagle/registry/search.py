"""Finding things in the registry: by the start of a hash, and runs by what they did.

Every method is one transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle.identity import MINIMUM_PREFIX
from kimi_eagle.records import RunRecord
from kimi_eagle.registry.store import AmbiguousDigest, Registry, UnknownDigest

LATEST = "latest"

# Kinds of things that have a hash and are no artifact.
RUN, KEY, MANIFEST, SHARD, ROW, PART = (
    "run",
    "stage key",
    "manifest",
    "shard",
    "row",
    "file of an artifact",
)

# Where hashes are, and what they name.
_HASHES = (
    ("runs", "id", f"'{RUN}'"),
    ("artifacts", "digest", "kind"),
    ("executions", "key", f"'{KEY}'"),
    ("runs", "manifest_digest", f"'{MANIFEST}'"),
    ("state_shards", "digest", f"'{SHARD}'"),
    ("state_rows", "key", f"'{ROW}'"),
)
_AFTER = "\x7f"  # greater than every character of a hash
_MOST = 50


@dataclass(frozen=True)
class RunFilter:
    """Which runs are asked for; what is None does not count."""

    since: str | None = None
    """Started at or after this time, in UTC as the registry writes it."""
    stage: str | None = None
    """With a stage of this name or kind."""
    status: str | None = None
    artifact: str | None = None
    """That made this artifact or took it in, by its whole digest."""
    name: str | None = None
    """Of a manifest with this name; `*` and `?` stand for what they stand for in a shell."""


@dataclass(frozen=True)
class Notes:
    """What the registry notes about an artifact beside what it is."""

    created_at: str
    verified_at: str | None
    pinned_at: str | None
    pin_note: str | None


class Search:
    """What is looked for in a registry."""

    def __init__(self, registry: Registry):
        self._registry = registry

    def runs(self, wanted: RunFilter, limit: int | None = None) -> list[RunRecord]:
        """Runs, newest first."""
        conditions, values = _conditions(wanted)
        query = f"select * from runs where {' and '.join(conditions)} order by seq desc limit ?"  # noqa: S608
        with self._registry.database.read() as connection:
            rows = connection.execute(query, (*values, -1 if limit is None else limit))
            return [_run(row) for row in rows]

    def count_runs(self) -> int:
        with self._registry.database.read() as connection:
            return int(connection.execute("select count(*) from runs").fetchone()[0])

    def run(self, prefix: str) -> RunRecord:
        """The run whose id starts so, or the latest.

        Raises:
            UnknownDigest: there is none, or what starts so is no run.
            AmbiguousDigest: there are several.
        """
        if prefix == LATEST:
            newest = self.runs(RunFilter(), 1)
            if not newest:
                raise UnknownDigest("there is no run yet; `kimi-eagle submit MANIFEST` makes one")
            return newest[0]
        prefix = _long_enough(prefix)
        with self._registry.database.read() as connection:
            found = list(_starting(connection, "runs", "id", f"'{RUN}'", prefix))
        if not found:
            digest, kind = self.find(prefix, what="run")
            raise UnknownDigest(f"{digest} is no run but a {kind}; `kimi-eagle show` tells of it")
        run = self._registry.run(_only(prefix, found)[0])
        assert run is not None, "runs are never deleted"
        return run

    def find(self, prefix: str, *, what: str = "run, artifact or stage key") -> tuple[str, str]:
        """The whole hash that `prefix` starts and what it names: an artifact's kind, or one of
        this module's constants.

        Raises:
            UnknownDigest: nothing starts with it, or it is too short to look up.
            AmbiguousDigest: several things do.
        """
        prefix = _long_enough(prefix)
        with self._registry.database.read() as connection:
            found = [item for place in _HASHES for item in _starting(connection, *place, prefix)]
            if not found:
                found = [(digest, PART) for digest in _parts(connection, prefix)]
        if not found:
            raise UnknownDigest(f"no {what} starts with {prefix}")
        return _only(prefix, found)

    def executions_with_key(self, key: str) -> list[int]:
        """The executions with a stage key, oldest first."""
        with self._registry.database.read() as connection:
            rows = connection.execute("select id from executions where key = ? order by id", (key,))
            return [row["id"] for row in rows]

    def runs_of_manifest(self, digest: str) -> list[RunRecord]:
        """The runs of a manifest, newest first."""
        with self._registry.database.read() as connection:
            rows = connection.execute(
                "select * from runs where manifest_digest = ? order by seq desc", (digest,)
            )
            return [_run(row) for row in rows]

    def holders(self, part: str) -> list[tuple[str, str]]:
        """(artifact, path) of the artifacts that have a file of this digest in them."""
        with self._registry.database.read() as connection:
            return [
                (artifact, path)
                for artifact, files in _with_part(connection, part)
                for path, (digest, _) in files.items()
                if digest == part
            ]

    def state(self, digest: str, kind: str) -> Mapping[str, Any]:
        """What is known of a shard, or of a row of hidden states."""
        query = (
            "select bytes, rows, tokens, created_at from state_shards where digest = ?"
            if kind == SHARD
            else "select shard, start, tokens, digest from state_rows where key = ?"
        )
        with self._registry.database.read() as connection:
            return dict(connection.execute(query, (digest,)).fetchone())

    def notes(self, digest: str) -> Notes:
        """When an artifact came to be known and was verified, and whether it is pinned."""
        with self._registry.database.read() as connection:
            row = connection.execute(
                "select a.created_at, a.verified_at, p.created_at, p.note from artifacts a "
                "left join pins p on p.digest = a.digest where a.digest = ?",
                (digest,),
            ).fetchone()
            return Notes(*row)

    def needed(self, hashes: Iterable[str]) -> dict[str, int]:
        """Of each hash, how many characters tell it from every other of a run, an artifact, a
        stage key, a shard and a row."""
        with self._registry.database.read() as connection:
            return {value: _needed(connection, value) for value in set(hashes)}


def _conditions(wanted: RunFilter) -> tuple[list[str], list[str]]:
    conditions, values = ["1"], []
    for condition, value in (
        ("started_at >= ?", wanted.since),
        ("status = ?", wanted.status),
        ("name glob ?", wanted.name),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if wanted.stage is not None:
        conditions.append(
            "exists (select 1 from executions e "
            "where e.run_id = runs.id and ? in (e.stage, e.kind))"
        )
        values.append(wanted.stage)
    if wanted.artifact is not None:
        # A file of a pinned folder was taken in with the folder.
        conditions.append(
            "id in (with wanted(digest) as "
            "(select ? union select parent from artifact_members where child = ?) "
            "select e.run_id from execution_outputs o join executions e on e.id = o.execution "
            "where o.digest in wanted union "
            "select e.run_id from execution_inputs i join executions e on e.id = i.execution "
            "where i.digest in wanted)"
        )
        values += [wanted.artifact, wanted.artifact]
    return conditions, values


def _long_enough(prefix: str) -> str:
    prefix = prefix.lower()
    if len(prefix) < MINIMUM_PREFIX:
        raise UnknownDigest(f"{prefix!r} is too short: give at least {MINIMUM_PREFIX} characters")
    return prefix


def _starting(
    connection: sqlite3.Connection, table: str, column: str, kind: str, prefix: str
) -> Iterator[tuple[str, str]]:
    rows = connection.execute(
        f"select distinct {column}, {kind} from {table} "  # noqa: S608
        f"where {column} >= ? and {column} < ? limit {_MOST}",
        (prefix, prefix + _AFTER),
    )
    yield from ((row[0], row[1]) for row in rows)


def _only(prefix: str, found: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Raises: AmbiguousDigest."""
    exact = [item for item in found if item[0] == prefix]
    if exact:
        return exact[0]
    if len(found) > 1:
        raise AmbiguousDigest(prefix, found)
    return found[0]


def _parts(connection: sqlite3.Connection, prefix: str) -> set[str]:
    """Digests of files inside artifacts that start so."""
    return {
        digest
        for _, files in _with_part(connection, prefix)
        for digest, _ in files.values()
        if digest.startswith(prefix)
    }


def _with_part(
    connection: sqlite3.Connection, prefix: str
) -> Iterator[tuple[str, Mapping[str, tuple[str, int]]]]:
    if not prefix.isalnum():
        return
    rows = connection.execute(
        "select digest, files from artifacts where instr(files, ?)", (f'"{prefix}',)
    )
    yield from ((row[0], json.loads(row[1])) for row in rows)


def _needed(connection: sqlite3.Connection, value: str) -> int:
    longest = 0
    for table, column, kind in _HASHES:
        if kind == f"'{MANIFEST}'":
            continue  # without an index: each look would read every run
        for sign, order in (("<", "desc"), (">", "asc")):
            row = connection.execute(
                f"select {column} from {table} where {column} {sign} ? "  # noqa: S608
                f"order by {column} {order} limit 1",
                (value,),
            ).fetchone()
            if row is not None:
                longest = max(longest, _shared(value, row[0]))
    return min(longest + 1, len(value))


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _run(row: sqlite3.Row) -> RunRecord:
    return RunRecord(**{name: row[name] for name in RunRecord.__dataclass_fields__})
