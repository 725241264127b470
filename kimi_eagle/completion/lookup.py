"""What a registry and a manifest have that a word could be the start of. sqlite3 alone.

Whatever goes wrong, there is nothing to complete: a shell has no place for messages.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

Candidate = tuple[str, str]
"""A word, and what it is."""

# As in `registry.schema` and `identity`, which take longer to import than all else here.
_FILE = "registry.sqlite"
_SHOWN = 12
_AFTER = "\x7f"  # greater than every character of a hash
_MOST, _LATE = 64, 1000
_HASHES = (
    ("runs", "id"),
    ("artifacts", "digest"),
    ("executions", "key"),
    ("state_shards", "digest"),
    ("state_rows", "key"),
)
_STAGE = re.compile(r"( +)([a-z][a-z0-9_-]*):(?:\s|$)")


class Lookup:
    """A registry, read only and in passing."""

    def __init__(self, root: Path):
        self._path = root / _FILE

    def runs(self, prefix: str) -> list[Candidate]:
        """Runs whose ids start so, newest first."""
        where, values = _starting("id", prefix)
        rows = self._rows(
            "select id, name || ', ' || status || ', ' || substr(started_at, 1, 16) "  # noqa: S608
            "from runs "
            f"where {where} order by seq desc limit {_MOST}",
            *values,
        )
        return self._shortened(rows, prefix)

    def artifacts(self, prefix: str, kinds: Iterable[str] = ()) -> list[Candidate]:
        """Artifacts of some kinds, or of all, newest first; without a prefix only what was made
        here."""
        where, values = _starting("digest", prefix)
        among = list(kinds)
        made = "" if prefix else " and state <> 'external'"
        wanted = f" and kind in ({', '.join('?' * len(among))})" if among else ""
        rows = self._rows(
            "select digest, kind || case label when '' then '' else ' ' || label end "  # noqa: S608
            f"from artifacts where {where}{made}{wanted} "
            f"order by rowid desc limit {_MOST}",
            *values,
            *among,
        )
        return self._shortened(rows, prefix)

    def stages(self, run: str | None = None) -> list[Candidate]:
        """Names of stages: of the run whose id starts so, of the latest, or of late ones."""
        if run is None:
            return self._rows(
                "select distinct stage, kind from "  # noqa: S608
                f"(select stage, kind from executions order by id desc limit {_LATE})"
            )
        where, values = _starting("run_id", run)
        if run == "latest":
            where, values = "run_id = (select id from runs order by seq desc limit 1)", ()
        return self._rows(
            f"select stage, kind from executions where {where} order by id limit {_MOST}",  # noqa: S608
            *values,
        )

    def names(self) -> list[Candidate]:
        """Names of manifests that were submitted of late."""
        return self._rows(
            "select distinct name, 'manifest' from "  # noqa: S608
            f"(select name from runs order by seq desc limit {_LATE})"
        )

    def _rows(self, query: str, *values: str) -> list[Candidate]:
        try:
            with closing(self._connect()) as connection:
                return [(str(row[0]), str(row[1])) for row in connection.execute(query, values)]
        except (sqlite3.Error, OSError):
            return []

    def _connect(self) -> sqlite3.Connection:
        """Without side files, where nobody has it open: see `registry.schema`."""
        opened = any(
            self._path.with_name(_FILE + end).exists() for end in ("-wal", "-journal", "-shm")
        )
        way = "mode=ro" if opened else "immutable=1"
        return sqlite3.connect(f"{self._path.absolute().as_uri()}?{way}", uri=True, timeout=0.2)

    def _shortened(self, rows: list[Candidate], prefix: str) -> list[Candidate]:
        """Hashes cut to what tells them from all others, and to no less than was typed."""
        try:
            with closing(self._connect()) as connection:
                return [
                    (digest[: max(_SHOWN, len(prefix), _needed(connection, digest))], what)
                    for digest, what in rows
                ]
        except (sqlite3.Error, OSError):
            return rows


def _starting(column: str, prefix: str) -> tuple[str, tuple[str, ...]]:
    """A condition, and its values; none without a prefix, so that the newest are found at once."""
    prefix = prefix.lower()
    return (f"{column} >= ? and {column} < ?", (prefix, prefix + _AFTER)) if prefix else ("1", ())


def _needed(connection: sqlite3.Connection, digest: str) -> int:
    longest = 0
    for table, column in _HASHES:
        for sign, order in (("<", "desc"), (">", "asc")):
            row = connection.execute(
                f"select {column} from {table} where {column} {sign} ? "  # noqa: S608
                f"order by {column} {order} limit 1",
                (digest,),
            ).fetchone()
            if row is not None and row[0] is not None:
                pairs = enumerate(zip(digest, row[0], strict=False))
                longest = max(longest, next((i for i, (a, b) in pairs if a != b), len(row[0])))
    return longest + 1


def stages_of(manifest: Path) -> list[Candidate]:
    """Names of the stages in a manifest's text, as far as its lines show them."""
    try:
        lines = manifest.read_text("utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []
    return [(name, "stage") for name in _stage_lines(lines)]


def _stage_lines(lines: Iterable[str]) -> Iterator[str]:
    inside, indent = False, ""
    for line in lines:
        if line[:1] not in ("", " ", "#"):
            inside = line.startswith("stages:")
            continue
        found = _STAGE.match(line) if inside else None
        if found:
            indent = indent or found[1]
            if found[1] == indent:
                yield found[2]
