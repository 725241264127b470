"""Which rows make which batch, in which epoch. Pure.

The order of an epoch is that of a digest of seed, epoch and row key: it is the same on every
machine, with every version of every library, and however many rows there are beside a row. Rows
are then put one after the other into the first of a few open batches that has room. Every row is
in exactly one batch of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

# Batches open at once: more fill better, and mix less.
_OPEN = 32


@dataclass(frozen=True)
class Item:
    """A row as packing sees it."""

    key: str
    """The key of its states; rows with equal states have equal keys."""
    positions: int
    """Positions it takes in a batch."""
    supervised: tuple[int, ...]
    """Positions with a loss at each TTT step."""


Batch = tuple[int, ...]
"""Numbers of items, in the order they lie in the batch."""


def order(items: Sequence[Item], seed: int, epoch: int) -> list[int]:
    """The numbers of the items in the order of an epoch."""

    def rank(number: int) -> tuple[bytes, int]:
        return blake3(f"{seed}/{epoch}/{items[number].key}".encode()).digest(), number

    return sorted(range(len(items)), key=rank)


def pack(items: Sequence[Item], size: int, numbers: Sequence[int]) -> list[Batch]:
    """Batches of at most `size` positions, of items in the order given (first fit).

    Raises:
        ValueError: an item is larger than a batch.
    """
    opened: list[list[int]] = []
    room: list[int] = []
    closed: list[Batch] = []
    for number in numbers:
        wanted = items[number].positions
        if wanted > size:
            raise ValueError(f"item {number} takes {wanted} positions of {size}")
        at = next((at for at, left in enumerate(room) if left >= wanted), None)
        if at is None:
            if len(opened) == _OPEN:
                fullest = min(range(_OPEN), key=room.__getitem__)
                closed.append(tuple(opened.pop(fullest)))
                room.pop(fullest)
            opened.append([])
            room.append(size)
            at = len(opened) - 1
        opened[at].append(number)
        room[at] -= wanted
    return closed + [tuple(batch) for batch in opened]


@dataclass(frozen=True)
class Step:
    """One optimizer step: the batches whose gradients it adds up."""

    epoch: int
    batches: tuple[Batch, ...]
    supervised: tuple[int, ...]
    """Positions with a loss in all of its batches, at each TTT step."""

    def rows(self) -> list[int]:
        return [number for batch in self.batches for number in batch]


def steps_of(
    items: Sequence[Item], size: int, accumulate: int, seed: int, epoch: int
) -> list[Step]:
    """The optimizer steps of an epoch.

    Args:
        size: positions in a batch.
        accumulate: batches to a step; the last step of an epoch has what is left.
    """
    batches = pack(items, size, order(items, seed, epoch))
    return [
        step(items, epoch, batches[first : first + accumulate])
        for first in range(0, len(batches), accumulate)
    ]


def step(items: Sequence[Item], epoch: int, batches: Sequence[Batch]) -> Step:
    """A step of some batches."""
    numbers = [number for batch in batches for number in batch]
    totals = tuple(map(sum, zip(*(items[number].supervised for number in numbers), strict=True)))
    return Step(epoch, tuple(batches), totals)
