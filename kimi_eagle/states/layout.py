"""Where shards lie, and how a states artifact lists its rows. Pure.

A states artifact is `rows.txt`: one line a row, in order, `<row key> <content digest> <tokens>`,
and `contract.json`. It holds no place: rows may move between shards, or be made again, and two
artifacts share every row they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROWS = "rows.txt"
CONTRACT = "contract.json"


@dataclass(frozen=True)
class StateRow:
    key: str
    digest: str
    tokens: int


def shard_path(root: Path, digest: str) -> Path:
    """`states/<2>/<digest>.safetensors` under the store's root."""
    return root / "states" / digest[:2] / f"{digest}.safetensors"


def write_rows(rows: Iterable[StateRow]) -> str:
    return "".join(f"{row.key} {row.digest} {row.tokens}\n" for row in rows)


def read_rows(text: str) -> list[StateRow]:
    """Raises: ValueError for a line that is not one."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split(" ")
        if len(parts) != 3 or len(parts[0]) != 64 or len(parts[1]) != 64:
            raise ValueError(f"{ROWS}:{number} is not a row of a states artifact")
        rows.append(StateRow(parts[0], parts[1], int(parts[2])))
    return rows
