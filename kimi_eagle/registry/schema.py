"""Open the registry's database: the schema gate, the migrations, and SQLite's settings."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DatabaseError, OperationalError

from kimi_eagle.registry.tables import REVISION

FILE = "registry.sqlite"

# How /proc/mounts writes blanks and backslashes.
_ESCAPE = re.compile(r"\\([0-7]{3})")

# How long a writer waits for another before it says so.
BUSY_SECONDS = 60

# File systems on which SQLite's write-ahead log must not be used: its shared memory needs one
# machine. Names as in /proc/mounts.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "glusterfs",
        "ceph",
        "fuse.sshfs",
        "beegfs",
        "9p",
        "afs",
        "gpfs",
        "fuse.glusterfs",
        "fuse.ceph",
        "virtiofs",
        "smb2",
        "ncpfs",
        "davfs",
        "orangefs",
        "pvfs2",
        "wekafs",
        "fuse.juicefs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.rclone",
        "fuse.davfs2",
        "fuse.mount.davfs",
    }
)


class RegistryError(Exception):
    """The registry cannot be used as it is; the message names the file and what to do."""


def open_database(root: Path, *, create: bool = True) -> Engine:
    """An engine on `root`'s registry, its schema brought up to this program's.

    A database that is newer than this program, or no database at all, is refused and its bytes
    are left alone.

    Raises:
        RegistryError: as above, or there is none and `create` is false.
    """
    path = root / FILE
    if not path.exists():
        if not create:
            raise RegistryError(
                f"there is no registry at {path}; `kimi-eagle submit MANIFEST` makes one "
                "(or point --root at one that exists)"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RegistryError(
                f"{root} cannot be made: {error.strerror}; --root names the folder that holds "
                "registry, artifacts and runs"
            ) from None
    found = _revision(path) if path.exists() and path.stat().st_size else None
    if found is not None and found != REVISION and found not in _known_revisions():
        raise RegistryError(
            f"{path} was written by a newer version of kimi-eagle (schema {found}, this program "
            f"knows {REVISION}); upgrade kimi-eagle, or use another --root. It was left untouched."
        )
    engine = _engine(path, _read_only_way(path) if not create else None)
    if found != REVISION:
        with readable(path):
            _migrate(engine)
    return engine


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say what SQLite says of a database as a `RegistryError` that names it."""
    try:
        yield
    except DatabaseError as error:
        # Its subclasses but one speak of our statements, not of the file.
        if type(error) not in (DatabaseError, OperationalError):
            raise
        raise RegistryError(
            f"the registry {path} cannot be used: {error.orig}; see that its folder can be written "
            "and has space left, or restore the file from a backup"
        ) from error


def _revision(path: Path) -> str | None:
    """The schema revision of an existing database; neither it nor its folder is changed."""
    # Reading a database in WAL mode leaves side files behind, unless it is taken as immutable:
    # right where nobody has it open, which a side file would show. One that a crash left in the
    # midst of a change must be mended first.
    sides = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
    ways = ["mode=ro", "mode=rw"]
    if not any(side.exists() for side in sides):
        ways.insert(0, "immutable=1")
    for way in ways:
        try:
            return _read_revision(path, way)
        except sqlite3.DatabaseError as error:
            problem = error
    raise RegistryError(
        f"{path} cannot be read as a registry ({problem}); restore it from a backup, or move it "
        "away and submit again"
    )


def _read_revision(path: Path, way: str) -> str | None:
    with closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?{way}", uri=True, timeout=BUSY_SECONDS)
    ) as connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master")}
        if "alembic_version" in tables:
            row = connection.execute("select version_num from alembic_version").fetchone()
            return str(row[0]) if row else None
    if tables:
        raise RegistryError(
            f"{path} is an SQLite database, but no registry of kimi-eagle; it was left untouched"
        )
    return None


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds `path`, or "" where it cannot be told.

    `mounts` is text as in /proc/mounts, which is read when it is not given.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text("utf-8", errors="surrogateescape")
        except OSError:
            return ""
    target = path.resolve()
    best, kind = "", ""
    for line in mounts.splitlines():
        _, mount, name, *_ = line.split(" ")
        mount = _ESCAPE.sub(lambda found: chr(int(found[1], 8)), mount)
        if (target == Path(mount) or Path(mount) in target.parents) and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def journal_mode(path: Path, mounts: str | None = None) -> str:
    """WAL, except on a network file system, where it would corrupt."""
    return "DELETE" if file_system(path, mounts) in NETWORK_FILE_SYSTEMS else "WAL"


def _read_only_way(path: Path) -> str | None:
    """How to open a registry that this user may read but not write; None for one that can be."""
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return None
    # Without a log there is no writer, and SQLite need not make one to read.
    return "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"


def _engine(path: Path, read_only: str | None = None) -> Engine:
    uri = f"{path.absolute().as_uri()}?{read_only or 'mode=rwc'}"
    url = URL.create("sqlite", database=uri, query={"uri": "true"})
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
    mode = journal_mode(path.parent)

    @event.listens_for(engine, "connect")
    def _settings(connection: Any, _record: Any) -> None:
        # SQLAlchemy's own begin is kept out of the way: see `_begin`.
        connection.isolation_level = None
        cursor = connection.cursor()
        if read_only is None:
            _set_journal_mode(cursor, mode)
        cursor.execute("pragma foreign_keys=on")
        cursor.execute("pragma synchronous=full")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # A transaction that reads and then writes must take the write lock first: a deferred one
        # fails at once when another writer came between, whatever the timeout.
        reading = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("begin" if reading else "begin immediate")

    return engine


def _set_journal_mode(cursor: Any, mode: str) -> None:
    """Switch the journal mode, patiently: SQLite answers "locked" at once to this one pragma,
    whatever the timeout, while another process is opening the same new database."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            if cursor.execute("pragma journal_mode").fetchone()[0].upper() != mode:
                cursor.execute(f"pragma journal_mode={mode}")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def scripts() -> Path:
    """Where the migrations are: in the package when installed, at the top level in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise RegistryError("the migrations are missing from this installation; install it again")


def _known_revisions() -> set[str]:
    return {path.name.split("_")[0] for path in (scripts() / "versions").glob("*.py")}


def _migrate(engine: Engine) -> None:
    # Imported late: only a new or an old database needs it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, REVISION)
