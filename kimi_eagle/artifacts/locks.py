"""Locks that end with their holder: `flock` on a file, never its mere existence."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType


class Lock:
    """An exclusive lock; the operating system releases it when the holder dies."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock; without `wait`, false when somebody holds it."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Read-write: over NFS a lock on a file opened for reading alone is refused.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
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


def held(path: Path) -> bool:
    """Whether a living process holds the lock at `path`."""
    if not path.exists():
        return False
    lock = Lock(path)
    try:
        return not lock.acquire(wait=False)
    finally:
        lock.release()
