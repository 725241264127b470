"""The workers' view of the index: read-only, straight from the registry's file.

Workers never write the registry. They ask which rows are there and where; what they add is
announced to the coordinator, which makes it findable.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a row's states lie: `tokens` rows of the shard's tensor from `start` on."""

    shard: str
    start: int
    tokens: int
    digest: str


class StateIndex:
    """Look rows up by key."""

    def __init__(self, registry: Path):
        self._connection = sqlite3.connect(
            f"{registry.absolute().as_uri()}?mode=ro", uri=True, timeout=60
        )

    def close(self) -> None:
        self._connection.close()

    def places(self, keys: Sequence[str]) -> dict[str, Place]:
        """The places of those rows that the store holds."""
        found: dict[str, Place] = {}
        for chunk in _chunks(keys):
            marks = ",".join("?" * len(chunk))
            query = (
                "select key, shard, start, tokens, digest from state_rows "  # noqa: S608
                f"where key in ({marks})"
            )
            for key, shard, start, tokens, digest in self._connection.execute(query, chunk):
                found[key] = Place(shard, start, tokens, digest)
        return found


def _chunks(keys: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), size):
        yield unique[start : start + size]
