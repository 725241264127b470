"""A registry that is only looked at: opened read-only, never migrated, nobody waited for.

What stands in the way is told apart (`Unusable.state`), for each has a remedy of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kimi_eagle.registry.schema import (
    FILE,
    REVISION,
    Database,
    RegistryError,
    known_revisions,
    read_only_way,
)
from kimi_eagle.registry.store import Registry

State = Literal["missing", "locked", "newer", "older", "corrupt", "unreadable"]

# A person who waits for a page would rather be told.
_WAIT_SECONDS = 2.0
_COMMANDS: dict[State, str] = {
    "missing": "kimi-eagle submit MANIFEST",
    "locked": "kimi-eagle runs",
    "newer": "pip install --upgrade '.[ui]'",
    "older": "kimi-eagle runs",
    "corrupt": "kimi-eagle registry rebuild",
    "unreadable": "kimi-eagle registry check",
}


class Unusable(RegistryError):
    """A registry cannot be looked at: why, of which file, and the one command that helps."""

    def __init__(self, state: State, path: Path, message: str):
        super().__init__(message)
        self.state = state
        self.path = path
        self.command = _COMMANDS[state]


class ReadRegistry(Registry):
    """The registry under a root, read-only; to be closed."""

    def __init__(self, root: Path):
        """Raises: Unusable."""
        self.root = root
        path = root / FILE
        if not path.exists():
            raise Unusable(
                "missing", path, f"there is no registry at {path}; a first submit makes one"
            )
        self._database = Database(path, read_only_way(path) or "mode=ro", _WAIT_SECONDS)
        try:
            with told_apart(path):
                _check(path, self._database)
        except BaseException:
            self._database.close()
            raise


@contextmanager
def told_apart(path: Path) -> Iterator[None]:
    """Say what SQLite says of a database that is read as `Unusable`."""
    try:
        yield
    except RegistryError as error:
        cause = error.__cause__
        if isinstance(error, Unusable) or not isinstance(cause, sqlite3.DatabaseError):
            raise
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Unusable(
                "locked", path, f"another process holds {path} ({cause}); try again in a moment"
            ) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise Unusable(
                "corrupt",
                path,
                f"{path} cannot be read as a registry ({cause}); it is made again from the "
                "records on disk, or taken from a backup by `kimi-eagle registry restore FILE`",
            ) from error
        raise Unusable("unreadable", path, f"{path} cannot be read: {cause}") from error


def _check(path: Path, database: Database) -> None:
    tables = {row[0] for row in database.ask("select name from sqlite_master where type='table'")}
    if "alembic_version" not in tables:
        state: State = "corrupt" if tables else "older"
        raise Unusable(state, path, f"{path} is no registry of kimi-eagle, or an empty one")
    rows = database.ask("select version_num from alembic_version")
    found = str(rows[0][0]) if rows else None
    if found == REVISION:
        return
    if found is not None and found not in known_revisions():
        raise Unusable(
            "newer",
            path,
            f"{path} was written by a newer version of kimi-eagle (schema {found}, this program "
            f"knows {REVISION}); install that version from its checkout",
        )
    raise Unusable(
        "older",
        path,
        f"{path} is of an older version (schema {found}, this program works with {REVISION}); "
        "any command that opens it brings it up",
    )
