"""Locks that end with their holder: `flock` on a file, never its mere existence."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

# Held together by what plans on the store, alone by what takes things out of it (see `gate`).
GATE = Path(".locks") / "gate"


class Lock:
    """A lock, exclusive unless `shared`; the operating system releases it when the holder dies."""

    def __init__(self, path: Path, *, shared: bool = False):
        self._path = path
        self._mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor: int | None = None

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock; without `wait`, false when somebody holds it."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Read-write: over NFS a lock on a file opened for reading alone is refused.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, self._mode | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            return False
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        self.acquire(wait=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def gate(root: Path, *, shared: bool) -> Lock:
    """The lock between what relies on the store as it finds it and what takes things away.

    A run holds it, shared, from looking at the store to having recorded what it will use of it;
    not while a stage works. `gc` and what replaces the registry hold it alone.
    """
    return Lock(root / GATE, shared=shared)


def held(path: Path) -> bool:
    """Whether a living process holds the lock at `path` alone.

    Who may only read the file may ask, and those who ask at once are not taken for its holder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return True
    finally:
        os.close(descriptor)
    return False
