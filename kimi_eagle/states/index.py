"""The workers' view of the index: read-only, straight from the registry's file.

Workers never write the registry. They ask which rows are there and where; what they add is
announced to the coordinator, which makes it findable.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.identity import short
from kimi_eagle.job import StageFailed
from kimi_eagle.states.layout import ROWS, StateRow, read_rows


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


def placed_rows(folder: Path, registry: Path, rows: int) -> list[tuple[str, Place | None]]:
    """Each row of a states artifact, in order: its key, and where its states lie.

    None stands for a row whose states were refused when they were made: it cannot be trained on.

    Args: `folder` of the artifact; `rows`: how many rows the rows file has.

    Raises:
        StageFailed: another number of rows, or one that the store does not hold as it was made.
    """
    listed = read_rows((folder / ROWS).read_text("utf-8"))
    if len(listed) != rows:
        raise StageFailed(f"the states list {len(listed)} rows, the rows file has {rows}")
    index = StateIndex(registry)
    try:
        return placed(listed, index)
    finally:
        index.close()


def placed(listed: Sequence[StateRow], index: StateIndex) -> list[tuple[str, Place | None]]:
    """As `placed_rows`, of rows that were read already. Raises: StageFailed."""
    places = index.places([row.key for row in listed if row.stored])
    found: list[tuple[str, Place | None]] = []
    for row in listed:
        place = places.get(row.key) if row.stored else None
        if row.stored and (place is None or place.digest != row.digest):
            raise StageFailed(
                f"row {short(row.key)} is not in the state store as it was extracted: submit "
                "again, and it is made again"
            )
        found.append((row.key, place))
    return found


def _chunks(keys: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), size):
        yield unique[start : start + size]
