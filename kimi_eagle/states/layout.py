"""Where shards lie, and how a states artifact lists its rows. Pure.

A states artifact is `rows.txt`: one line a row, in order, `<row key> <content digest> <tokens>`,
and `contract.json`. It holds no place: rows may move between shards, or be made again, and two
artifacts share every row they have in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROWS = "rows.txt"
CONTRACT = "contract.json"

_ROW = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{64}) ([1-9][0-9]*)", re.ASCII)


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
    """Raises: ValueError for a line that is not exactly one, or is cut off."""
    *lines, rest = text.split("\n")
    if rest:
        raise ValueError(f"{ROWS}:{len(lines) + 1} is cut off")
    rows = []
    for number, line in enumerate(lines, 1):
        found = _ROW.fullmatch(line)
        if found is None:
            raise ValueError(f"{ROWS}:{number} is not a row of a states artifact")
        rows.append(StateRow(found[1], found[2], int(found[3])))
    return rows
