"""Where shards lie, and how a states artifact lists its rows. Pure.

A states artifact is `rows.txt`: one line a row, in order, `<row key> <content digest> <tokens>`,
and `contract.json`. It holds no place: rows may move between shards, or be made again, and two
artifacts share every row they have in common.

A row whose states were refused, as far as `max_bad_rows` allows any, keeps its line:
`<row key> - <tokens> <reason>`. So lines and rows go on matching one to one, and training leaves
out exactly these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROWS = "rows.txt"
CONTRACT = "contract.json"

_ROW = re.compile(
    r"([0-9a-f]{64}) (?:([0-9a-f]{64}) ([1-9][0-9]*)|- ([1-9][0-9]*) ([a-z]+(?:-[a-z]+)*))",
    re.ASCII,
)


@dataclass(frozen=True)
class StateRow:
    """One line. A row has a digest, or else the reason why its states were refused."""

    key: str
    digest: str
    tokens: int
    refused: str = ""

    @property
    def stored(self) -> bool:
        return not self.refused


def shard_path(root: Path, digest: str) -> Path:
    """`states/<2>/<digest>.safetensors` under the store's root."""
    return root / "states" / digest[:2] / f"{digest}.safetensors"


def write_rows(rows: Iterable[StateRow]) -> str:
    return "".join(
        f"{row.key} {row.digest} {row.tokens}\n"
        if row.stored
        else f"{row.key} - {row.tokens} {row.refused}\n"
        for row in rows
    )


def read_rows(text: str) -> list[StateRow]:
    """Every row, those that were refused too.

    Raises: ValueError for a line that is not exactly one, or is cut off.
    """
    *lines, rest = text.split("\n")
    if rest:
        raise ValueError(f"{ROWS}:{len(lines) + 1} is cut off")
    rows = []
    for number, line in enumerate(lines, 1):
        found = _ROW.fullmatch(line)
        if found is None:
            raise ValueError(f"{ROWS}:{number} is not a row of a states artifact")
        tokens = int(found[3] or found[4])
        rows.append(StateRow(found[1], found[2] or "", tokens, found[5] or ""))
    return rows


def stored_digests(text: str) -> dict[str, str]:
    """Content digest by key of the rows that have states. Raises: as `read_rows`."""
    return {row.key: row.digest for row in read_rows(text) if row.stored}
