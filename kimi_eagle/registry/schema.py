"""Open the registry's database: the schema gate, SQLite's settings, one transaction at a time.

Standard library only: SQLAlchemy and Alembic take longer to load than most commands to run, and
come in (`registry.engine`) where a query is made of parts or the schema is to be changed.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

FILE = "registry.sqlite"

# The revision of `migrations/versions` that this program works with; the gate compares it.
REVISION = "0001"

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


class Database:
    """A registry's file, through one connection; threads take turns."""

    def __init__(
        self, path: Path, read_only: str | None = None, busy_seconds: float = BUSY_SECONDS
    ):
        """`read_only` is how to open a file that may not be written, as of `read_only_way`."""
        self.path = path
        self.read_only = read_only
        self._busy_seconds = busy_seconds
        self._connection: sqlite3.Connection | None = None
        self._turn = threading.RLock()

    @property
    def uri(self) -> str:
        return f"{self.path.absolute().as_uri()}?{self.read_only or 'mode=rwc'}"

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is kept whole or not at all.

        It takes the write lock first: one that reads and then writes fails at once when another
        writer came between, whatever the timeout.

        Raises: RegistryError.
        """
        with self._turn, readable(self.path):
            connection = self._connected()
            connection.execute("begin immediate")
            try:
                yield connection
                connection.execute("commit")
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees the registry as it is at one moment. Raises: RegistryError."""
        with self._turn, readable(self.path):
            connection = self._connected()
            connection.execute("begin")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    def ask(self, question: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """The rows that one statement finds. Raises: RegistryError."""
        with self._turn, readable(self.path):
            return self._connected().execute(question, values).fetchall()

    def close(self) -> None:
        with self._turn:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(
                self.uri,
                uri=True,
                timeout=self._busy_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                connection.row_factory = sqlite3.Row
                self.configure(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def configure(self, connection: sqlite3.Connection) -> None:
        """What every connection to a registry is set to."""
        if self.read_only is None:
            _set_journal_mode(connection, journal_mode(self.path.parent))
        connection.execute("pragma foreign_keys=on")
        connection.execute("pragma synchronous=full")
        # In KiB. What does not fit is written before its transaction ends, and then again.
        connection.execute("pragma cache_size=-16384")


def open_database(root: Path, *, create: bool = True) -> Database:
    """`root`'s registry, its schema brought up to this program's.

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
    found = known_revision(path) if path.exists() else None
    database = Database(path, read_only_way(path) if not create else None)
    if found is None:
        _make(database)
        found = known_revision(path)
    if found != REVISION:
        # Imported late: only an old database needs it.
        from kimi_eagle.registry.engine import migrate

        migrate(database)
    return database


def _make(database: Database) -> None:
    """Give an empty database what the migrations would, without loading what runs them."""
    statements = _statements()
    with database.write() as connection:
        if connection.execute("select 1 from sqlite_master").fetchone():
            return  # another process was first
        for statement in statements:
            connection.execute(statement)


def _statements() -> list[str]:
    """The statements of `migrations/schema.sql`."""
    found, text = [], ""
    for line in (scripts() / "schema.sql").read_text("utf-8").splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            found.append(text.strip())
            text = ""
    return found


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say what SQLite says of a database as a `RegistryError` that names it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        # Its subclasses but one speak of our statements, not of the file.
        if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError):
            raise
        raise RegistryError(
            f"the registry {path} cannot be used: {error}; see that its folder can be written "
            "and has space left, or restore the file from a backup"
        ) from error


def known_revision(path: Path) -> str | None:
    """The schema revision of an existing database that this program can use; None when it has
    none yet. Neither it nor its folder is changed.

    Raises:
        RegistryError: it was written by a newer version, or is no registry.
    """
    found = _revision(path) if path.stat().st_size else None
    if found is not None and found != REVISION and found not in known_revisions():
        raise RegistryError(
            f"{path} was written by a newer version of kimi-eagle (schema {found}, this program "
            f"knows {REVISION}); upgrade kimi-eagle, or use another --root. It was left untouched."
        )
    return found


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
        f"{path} cannot be read as a registry ({problem}); `kimi-eagle registry restore FILE` "
        "takes a backup, `kimi-eagle registry rebuild` makes it again from the records on disk"
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


def read_only_way(path: Path) -> str | None:
    """How to open a registry that this user may read but not write; None for one that can be."""
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return None
    # Without a log there is no writer, and SQLite need not make one to read.
    return "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"


def _set_journal_mode(connection: sqlite3.Connection, mode: str) -> None:
    """Switch the journal mode, patiently: SQLite answers "locked" at once to this one pragma,
    whatever the timeout, while another process is opening the same new database."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            if connection.execute("pragma journal_mode").fetchone()[0].upper() != mode:
                connection.execute(f"pragma journal_mode={mode}")
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


def known_revisions() -> set[str]:
    return {path.name.split("_")[0] for path in (scripts() / "versions").glob("*.py")}
