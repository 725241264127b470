"""Care of the registry's file: check it, back it up, restore it, put another in its place."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kimi_eagle.registry.schema import (
    BUSY_SECONDS,
    FILE,
    RegistryError,
    known_revision,
    open_database,
    readable,
)

# What SQLite keeps beside a database; it is taken for part of whatever lies under the main name.
SIDES = ("-wal", "-shm", "-journal")

# Every table that records on disk can make again, in an order that foreign keys allow.
TABLES = (
    "runs",
    "artifacts",
    "artifact_members",
    "pins",
    "executions",
    "execution_inputs",
    "execution_outputs",
    "state_shards",
    "state_rows",
)

Tables = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by table, as columns by name."""


@dataclass(frozen=True)
class FileCheck:
    """What SQLite says of a registry's file."""

    path: Path
    revision: str | None
    problems: tuple[str, ...]
    counts: Mapping[str, int]
    """Rows by table; empty where the file cannot be read that far."""


@dataclass(frozen=True)
class Copied:
    """A registry's file that was written from another."""

    path: Path
    bytes: int
    runs: int
    revision: str | None
    aside: Path | None = None
    """Where what it took the place of is kept."""


def check_file(root: Path) -> FileCheck:
    """Have SQLite check `root`'s registry; nothing is changed.

    Raises:
        RegistryError: there is none, it is none, or a newer version wrote it.
    """
    path = _existing(root)
    counts: dict[str, int] = {}
    try:
        revision = known_revision(path)
    except RegistryError:
        found = _unreadable(path)
        if found is None:
            raise  # SQLite can read it, this program cannot
        return FileCheck(path, None, (found,), counts)
    try:
        with closing(_connect(path, "mode=ro")) as connection:
            problems = _integrity(connection)
            for table in TABLES:
                (counts[table],) = connection.execute(f"select count(*) from {table}").fetchone()  # noqa: S608
    except sqlite3.DatabaseError as error:
        problems = [str(error)]
    return FileCheck(path, revision, tuple(problems), counts)


def backup(root: Path, target: Path, *, force: bool) -> Copied:
    """Write `root`'s registry as it is at one moment to `target`, whole or not at all; it may be
    in use meanwhile.

    Raises:
        RegistryError: there is none to copy, it is damaged, or `target` is there already and
            `force` is false.
    """
    path = _existing(root)
    revision = known_revision(path)
    taken = [p for p in (target, *_sides(target)) if p.exists()]
    if any(p.exists() and p.samefile(path) for p in taken):
        raise RegistryError(f"{target} is the registry itself; name another file")
    if taken and not force:
        raise RegistryError(f"{taken[0]} is there already; name another file, or give --force")
    with _temporary(target) as copy:
        with (
            readable(path),
            closing(_connect(path, "mode=ro")) as source,
            closing(sqlite3.connect(copy)) as connection,
        ):
            # All in one step: under a log it hinders no writer, and no writer makes it start anew.
            source.backup(connection)
        runs = _settled(copy, path)
        for side in _sides(target):
            side.unlink(missing_ok=True)
        if force:
            copy.replace(target)
        else:
            _link(copy, target)
        _sync_folder(target.parent)
    return Copied(target, target.stat().st_size, runs, revision)


def restore(root: Path, source: Path) -> Copied:
    """Put a backup in the place of `root`'s registry, which is kept aside.

    The caller sees to it that no run is alive.

    Raises:
        RegistryError: the backup is none, is damaged, or a newer version wrote it; it and the
            registry are left as they are.
        OSError: it cannot be read.
    """
    size = source.stat().st_size
    beside = [side for side in _sides(source) if side.exists()]
    if beside:
        raise RegistryError(
            f"{beside[0]} lies beside {source}: SQLite would take it for a part of it, and a "
            "backup has none; if they belong together, open the file with sqlite3 once, else move "
            "it away"
        )
    revision = known_revision(source) if size else None
    if revision is None:
        raise RegistryError(f"{source} holds no registry")
    root.mkdir(parents=True, exist_ok=True)
    with _temporary(root / FILE) as copy:
        shutil.copyfile(source, copy)
        runs = _settled(copy, source)
        aside = put_in_place(root, copy, "before-restore")
    return Copied(root / FILE, size, runs, revision, aside)


def write_anew(folder: Path, tables: Tables) -> Path:
    """Make a registry of these rows in an empty folder; returns its file, which has no sides.

    Raises:
        RegistryError: the rows do not fit together.
    """
    database = open_database(folder)
    try:
        with database.write() as connection:
            # What was reused may have a number below that of what it was reused from.
            connection.execute("pragma defer_foreign_keys=on")
            for table in TABLES:
                for row in tables.get(table, ()):
                    connection.execute(
                        f"insert into {table} ({','.join(row)}) "  # noqa: S608
                        f"values ({','.join(':' + name for name in row)})",
                        row,
                    )
    except sqlite3.IntegrityError as error:
        raise RegistryError(f"the records do not fit together: {error}") from error
    finally:
        database.close()
    _settled(folder / FILE, folder / FILE)
    return folder / FILE


def put_in_place(root: Path, new: Path, word: str) -> Path | None:
    """Give `new` the name of `root`'s registry; what had it is kept aside, side files included.

    At every moment there is a registry under the name, and none beside the side files of another.
    Returns where the old one is, if there was one.
    """
    path = root / FILE
    aside = None
    if path.exists():
        # A log that can be taken into the old file first is not needed beside it.
        with suppress(sqlite3.DatabaseError, RegistryError):
            known_revision(path)
            with closing(_connect(path, "mode=rw")) as connection:
                connection.execute("pragma wal_checkpoint(truncate)")
                connection.execute("pragma journal_mode=delete")
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        aside = path.with_name(f"{FILE}.{word}-{stamp}-{secrets.token_hex(2)}")
        _link(path, aside)
    for end in SIDES:
        side = path.with_name(path.name + end)
        if not side.exists():
            continue
        if aside is None:
            side.unlink()
        else:
            side.rename(aside.with_name(aside.name + end))
    _sync_folder(root)
    new.replace(path)
    _sync_folder(root)
    return aside


def _existing(root: Path) -> Path:
    path = root / FILE
    if not path.exists():
        raise RegistryError(
            f"there is no registry at {path}; --root names the folder that holds it, "
            "`kimi-eagle registry rebuild` makes one of the records there, "
            "`kimi-eagle registry restore FILE` takes a backup"
        )
    return path


def _sides(path: Path) -> list[Path]:
    return [path.with_name(path.name + end) for end in SIDES]


def _connect(path: Path, way: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{way}", uri=True, timeout=BUSY_SECONDS, isolation_level=None
    )


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A name beside `target` for a database that is being written."""
    path = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield path
    finally:
        for leftover in (path, *_sides(path)):
            leftover.unlink(missing_ok=True)


def _settled(copy: Path, origin: Path) -> int:
    """Check a copy, rid it of side files and make it last; returns how many runs it holds.

    Raises: RegistryError, which names `origin`.
    """
    try:
        with closing(_connect(copy, "mode=rw")) as connection:
            connection.execute("pragma journal_mode=delete")
            problems = _integrity(connection)
            runs = 0 if problems else connection.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.DatabaseError as error:
        problems = [str(error)]
    if problems:
        raise RegistryError(
            f"{origin} is damaged: {problems[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
            + "; `kimi-eagle registry rebuild` makes a registry of the records on disk"
        )
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    return int(runs)


def _unreadable(path: Path) -> str | None:
    """Why SQLite can read nothing of a file; None when it can."""
    try:
        with closing(_connect(path, "mode=ro")) as connection:
            connection.execute("select name from sqlite_master").fetchall()
    except sqlite3.DatabaseError as error:
        return (
            f"{path} cannot be read ({error}): `kimi-eagle registry restore FILE` takes a backup, "
            "`kimi-eagle registry rebuild` makes a registry of the records on disk"
        )
    return None


def _integrity(connection: sqlite3.Connection) -> list[str]:
    found = [row[0] for row in connection.execute("pragma integrity_check")]
    problems = [] if found == ["ok"] else found
    problems += [
        f"row {row} of {table} refers to a row of {parent} that is not there"
        for table, row, parent, _ in connection.execute("pragma foreign_key_check")
    ]
    return problems


def _link(source: Path, target: Path) -> None:
    """Give a file a second name that nobody has yet; where there are no links, a copy does."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise RegistryError(
            f"{target} is there already; name another file, or give --force"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        shutil.copyfile(source, target)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
