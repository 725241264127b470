"""The root: whether its file system does what the store and the registry rely on."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from kimi_eagle.artifacts.files import sync_folder, write_bytes
from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.doctor.checks import ABSENT, BROKEN, OK, WARN, Check
from kimi_eagle.registry.schema import (
    FILE,
    NETWORK_FILE_SYSTEMS,
    REVISION,
    RegistryError,
    file_system,
    known_revision,
)
from kimi_eagle.terminal import human_size

_LITTLE, _TOO_LITTLE = 20e9, 1e9
_FEW_NAMES = 10_000
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_ANOTHER_ROOT = "give a folder of yours with --root or KIMI_EAGLE_ROOT"
_ANOTHER_DISK = "put --root on another file system"

# Whether another process is kept out of what this one has locked.
_TRY = """
import fcntl, sqlite3, sys
file = open(sys.argv[1], "r+b")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("flock")
except OSError:
    pass
try:
    sqlite3.connect(sys.argv[2], timeout=0, isolation_level=None).execute("begin immediate")
    print("SQLite")
except sqlite3.OperationalError:
    pass
"""


def place(root: Path, mounts: str | None = None) -> list[Check]:
    """All that concerns the root. It is not made where it is not there; what is tried out is tried
    in a folder that is taken away again.

    Args:
        mounts: text as in /proc/mounts, which is read where it is not given.
    """
    root = root.absolute()
    where = _nearest(root)
    if not where.is_dir():
        return [Check("root", BROKEN, f"{where} is no folder", _ANOTHER_ROOT)]
    there = "" if where == root else f"; {root} will be made at the first submit"
    written = _writes(where)
    if written is not None:
        return [written, _kind(where, mounts), _free(where), _registry(root)]
    return [
        Check("root", OK, f"{where} can be written{there}"),
        _kind(where, mounts),
        _durable(where),
        _free(where),
        _registry(root),
    ]


def _nearest(root: Path) -> Path:
    """The root, or the folder nearest above it that there is."""
    return next(path for path in (root, *root.parents) if os.path.lexists(path))


def _writes(where: Path) -> Check | None:
    """What hinders writing, if anything does."""
    trial = where / f".doctor-{secrets.token_hex(4)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        text = f"{where} cannot be written: {error.strerror}"
        return Check("root", BROKEN, f"{text}; what is there can be read", _ANOTHER_ROOT)
    return None


def _kind(where: Path, mounts: str | None) -> Check:
    kind = file_system(where, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        return Check(
            "file system",
            WARN,
            f"{kind}, of the network: the registry does without its write-ahead log there",
            "submit from one machine at a time, or put --root on a local disk",
        )
    if kind in _MEMORY_FILE_SYSTEMS:
        return Check(
            "file system", WARN, f"{kind}: gone when the machine restarts", "put --root on a disk"
        )
    return Check("file system", OK, kind or "unknown")


def _durable(where: Path) -> Check:
    """Whether fsync, rename and locks do what they should."""
    name = "fsync, rename, locks"
    trial = where / f".doctor-{secrets.token_hex(4)}"
    trial.mkdir()
    try:
        for content in (b"first", b"second"):
            write_bytes(trial / "file", content)  # fsync, rename over what is there
        sync_folder(trial)
        if (trial / "file").read_bytes() != b"second":
            return Check(name, BROKEN, "a renamed file is not what it was", _ANOTHER_DISK)
        broken = _unlocked(trial)
    except (OSError, sqlite3.Error, subprocess.SubprocessError) as error:
        return Check(name, BROKEN, str(error), _ANOTHER_DISK)
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    if broken:
        text = f"two processes hold one lock at once ({', '.join(broken)})"
        return Check(name, BROKEN, text, f"mount it with locks, or {_ANOTHER_DISK}")
    return Check(name, OK, "as they should be")


def _unlocked(trial: Path) -> list[str]:
    """The kinds of locks that keep nobody out."""
    lock, database = trial / "lock", trial / "trial.sqlite"
    with (
        Lock(lock),
        closing(sqlite3.connect(database, isolation_level=None)) as connection,
    ):
        connection.execute("create table trial (value)")
        connection.execute("begin immediate")
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRY, str(lock), str(database)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.split()


def _free(where: Path) -> Check:
    usage = shutil.disk_usage(where)
    names = os.statvfs(where)
    text = f"{human_size(usage.free)} free of {human_size(usage.total)}"
    more = "`kimi-eagle gc` says what can go, or put --root on a larger disk"
    if names.f_files and names.f_favail < _FEW_NAMES:
        return Check("disk", WARN, f"{text}, {names.f_favail} files more", more)
    if usage.free < _TOO_LITTLE:
        return Check("disk", BROKEN, text, more)
    if usage.free < _LITTLE:
        return Check("disk", WARN, f"{text}; Kimi-K2.5's hidden states take 57 kB a token", more)
    return Check("disk", OK, text)


def _registry(root: Path) -> Check:
    path = root / FILE
    if not os.path.lexists(path):
        return Check("registry", ABSENT, f"none at {path} yet; the first submit makes one")
    try:
        found = known_revision(path)
    except (RegistryError, OSError) as error:
        return Check("registry", BROKEN, str(error), "see the message")
    if found != REVISION:
        text = f"revision {found or 'none'}; this program's is {REVISION}"
        return Check("registry", OK, f"{text}: the next command that writes brings it up")
    return Check("registry", OK, f"revision {found}")
