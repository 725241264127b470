"""Regions of one block of memory, given out and taken back in the same order. Pure."""

from __future__ import annotations

from collections import deque

# Regions begin on cache lines, so that any dtype may be laid over them.
ALIGNMENT = 64


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Ring:
    """Who is given regions of a ring; what bounds the memory between an engine and its writer."""

    def __init__(self, size: int):
        self.size = size
        self._given: deque[tuple[int, int]] = deque()  # (start, end), oldest first

    def take(self, size: int) -> int | None:
        """The start of a region of at least `size` bytes; None while there is no room for it."""
        size = aligned(size)
        start, room = self._free()
        if size > room:
            return None
        self._given.append((start, start + size))
        return start

    def room(self) -> int:
        """Bytes that one region may have now."""
        return self._free()[1]

    def give_back(self) -> None:
        """Take the oldest region back."""
        self._given.popleft()

    def _free(self) -> tuple[int, int]:
        """(start, length) of the longest stretch that the next region may have."""
        if not self._given:
            return 0, self.size
        first, last = self._given[0][0], self._given[-1][1]
        if last <= first:  # the newest lies before the oldest: it has wrapped around
            return last, first - last
        if self.size - last >= first:
            return last, self.size - last
        return 0, first
