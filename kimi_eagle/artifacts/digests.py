"""Digests of files, read once: a file whose stat has not changed is not read again.

The stat that counts is device, inode, size, mtime and ctime. A file that changed so recently
that its next change could carry the same times is digested but not remembered. A file that was
only touched is read once more, found equal, and remembered under its new times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kimi_eagle.identity import digest_file

# The times of a file advance with the kernel's clock tick; some file systems keep whole seconds.
_TICK_NS = 50_000_000
_COARSE_NS = 2_100_000_000

Stat = tuple[int, int, int, int, int]

# No file looks like this: what is kept under it is never taken for known.
_NEVER: Stat = (-1, -1, -1, -1, -1)


class Memory(Protocol):
    """Where digests are remembered between runs."""

    def file_stats(self) -> dict[str, tuple[Stat, str]]: ...

    def put_file_stats(self, stats: Mapping[str, tuple[Stat, str]]) -> None: ...


def stat_of(path: Path | str) -> Stat:
    """(device, inode, size, mtime_ns, ctime_ns). Raises: OSError."""
    found = os.stat(path)  # noqa: PTH116 - thousands of looks, and no Path made for each
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Digests:
    """A cache of file digests over a memory that outlives it."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._known: dict[str, tuple[Stat, str]] | None = None
        self._fresh: dict[str, tuple[Stat, str]] = {}

    def of(self, path: Path) -> tuple[str, int]:
        """(digest, size in bytes) of a file's present content.

        Raises:
            OSError: it cannot be read, or keeps changing while it is read.
        """
        name = str(path.absolute())
        looked = time.time_ns()
        stat = stat_of(path)
        known = self._lookup(name)
        if known is not None and known[0] == stat:
            return known[1], stat[2]
        return self._read(path, name, looked, stat)

    def afresh(self, path: Path) -> tuple[str, int]:
        """As `of`, whatever is remembered: the file is read, and what it holds is remembered.

        May be called from several threads at once.
        """
        looked = time.time_ns()
        return self._read(path, str(path.absolute()), looked, stat_of(path))

    def _read(self, path: Path, name: str, looked: int, stat: Stat) -> tuple[str, int]:
        for _ in range(3):
            digest = digest_file(path)
            looked_again, again = time.time_ns(), stat_of(path)
            if again == stat:
                self._remember(name, digest, stat, looked)
                return digest, stat[2]
            looked, stat = looked_again, again
        raise OSError(f"{path} changes while it is read")

    def stands(self, path: str, digest: str) -> bool:
        """Whether the file at an absolute path is known to hold this, and has not changed since:
        nothing is read."""
        known = self._lookup(path)
        try:
            return known is not None and known == (stat_of(path), digest)
        except OSError:
            return False

    def remember(self, path: Path, digest: str) -> None:
        """Keep a digest that the caller knows for a file that nothing changes any more."""
        looked = time.time_ns()
        self._remember(str(path.absolute()), digest, stat_of(path), looked)

    def _remember(self, name: str, digest: str, stat: Stat, looked: int) -> None:
        """Keep a digest, unless a change after `looked`, before the file was read, could have
        left its times as they are in `stat`; what was known before is forgotten even then."""
        age = looked - max(stat[3], stat[4])
        coarse = stat[3] % 1_000_000_000 == 0 and stat[4] % 1_000_000_000 == 0
        stands = age > (_COARSE_NS if coarse else _TICK_NS)
        self._fresh[name] = (stat if stands else _NEVER, digest)

    def flush(self) -> None:
        """Hand what was learnt to the memory."""
        if self._fresh:
            self._memory.put_file_stats(self._fresh)
            if self._known is not None:
                self._known.update(self._fresh)
            self._fresh.clear()

    def _lookup(self, name: str) -> tuple[Stat, str] | None:
        if name in self._fresh:
            return self._fresh[name]
        if self._known is None:
            self._known = self._memory.file_stats()
        return self._known.get(name)
