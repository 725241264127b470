"""How many rows and tokens sources are likely to make, before anybody renders them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kimi_eagle.pins import Pinned
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.rows.sources import BadRecord, read_records
from kimi_eagle.terminal import human_size

# English chats as JSON lines; where an earlier `prepare` is on record, its own rate counts.
_SOURCE_BYTES_OF_TOKEN = 4.0
_COMPRESSED = (".gz", ".xz")
_COMPRESSION = 4
# Records that say how large one is.
_LOOKED_AT = 64


@dataclass(frozen=True)
class Given:
    """What somebody expects a stage to make."""

    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Ahead:
    """Rows that are not made yet."""

    tokens: int
    rows: int | None
    """None where nothing tells."""
    basis: str


def ahead(
    sources: Mapping[str, Sequence[Pinned]], params: Any, given: Given, registry: Ledger
) -> Ahead | None:
    """What a stage that makes rows would make of its sources; None where nothing tells.

    Args:
        sources: what it pins, by role; sources that are not here are not among them.
        params: the stage's.
        given: counts for more than all else.
    """
    if given.tokens is not None:
        return Ahead(given.tokens, given.rows, "as given")
    longest = getattr(params, "max_length", None)
    if given.rows is not None and longest:
        said = f"as given, {given.rows:,} rows, if each has all of {longest:,} tokens"
        return Ahead(given.rows * longest, given.rows, said)
    size, records, known = 0.0, 0.0, True
    for role, items in sources.items():
        if not is_data(role) or not items:
            continue
        held = _unpacked((item.record.label, item.record.bytes) for item in items)
        each = _bytes_of_record(items[0].path)
        share = 1.0
        if each is None:
            known = False
        else:
            limit = _limit(params, role)
            share = min(1.0, limit * each / held) if limit and held else 1.0
            records += share * held / each
        size += share * held
    if not size:
        return None
    rows = round(records) if known else None
    rate, whose = _SOURCE_BYTES_OF_TOKEN, "at 4 bytes a token"
    before = registry.latest_of("prepare", "")
    measured = _rate(before, registry) if before is not None else None
    if before is not None and measured is not None:
        rate, whose = measured, f"at {measured:.1f} bytes a token, as in run {before.run_id}"
    basis = f"an estimate from {human_size(round(size))} of sources {whose}"
    if rows is not None:
        basis += ", a row a conversation"
    return Ahead(round(size / rate), rows, f"{basis}; the rows are not made yet")


def is_data(role: str) -> bool:
    return role.split(".")[0] == "sources"


def _limit(params: Any, role: str) -> int | None:
    """How many conversations are taken of the source that a role is of."""
    index = int(role.partition(".")[2])
    listed = getattr(params, "sources", ())
    return getattr(listed[index], "limit", None) if index < len(listed) else None


def _bytes_of_record(path: Path) -> float | None:
    """Of the first records of a file; None of one that is no JSON, or none that can be read."""
    if ".json" not in path.name:
        return None
    try:
        sizes = [
            len(json.dumps(record.value, ensure_ascii=False).encode("utf-8"))
            for record in islice(read_records(path), _LOOKED_AT)
            if record.error is None
        ]
    except (BadRecord, OSError, ImportError, ValueError):
        return None
    return sum(sizes) / len(sizes) if sizes else None


def _rate(made: ExecutionRecord, registry: Ledger) -> float | None:
    """Bytes of its sources for each token that an execution made."""
    tokens = made.metrics.get("tokens")
    if not tokens or made.document is None:
        return None
    files = [
        registry.artifact(digest)
        for role, digests in made.document["inputs"].items()
        if is_data(role)
        for digest in digests
    ]
    size = _unpacked((file.label, file.bytes) for file in files if file is not None)
    return size / tokens if size else None


def _unpacked(files: Iterable[tuple[str, int]]) -> int:
    """Bytes of source files, those that are compressed at what they are likely to hold."""
    return sum(size * (_COMPRESSION if label.endswith(_COMPRESSED) else 1) for label, size in files)
