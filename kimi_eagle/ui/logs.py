"""The end of what a stage printed, without reading what comes before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.follow import StageEvents, stage_log

FAILED_LINES = 40
_LINE = 400
_MOST_BYTES = 4 << 20
_EVENTS_BYTES = 64 << 10


@dataclass(frozen=True)
class Tail:
    """The last lines of a log."""

    path: Path
    lines: tuple[str, ...]
    bytes: int
    """Of the whole log; 0 where there is none."""
    whole: bool

    def document(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "whole": self.whole,
            "lines": list(self.lines),
        }


def tail(root: Path, run_id: str, stage: str, lines: int) -> Tail:
    """The last lines that a stage printed; none where it printed nothing."""
    path = stage_log(root, run_id, stage)
    wanted = min(lines * _LINE, _MOST_BYTES)
    data, size = _end_of(path, wanted)
    text = data.decode("utf-8", errors="replace")
    # Of a bar that moves on one line, what stood there last.
    found = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    if found and not found[-1]:
        found.pop()
    if size > wanted and len(found) > 1:
        found = found[1:]  # its beginning is cut off
    return Tail(path, tuple(found[-lines:]), size, size <= wanted and len(found) <= lines)


def last_progress(root: Path, run_id: str, stage: str) -> Mapping[str, Any] | None:
    """The last `progress` event of a stage: done, total, unit."""
    data, _ = _end_of(StageEvents(root, run_id, stage).place, _EVENTS_BYTES)
    for line in reversed(data.splitlines()):
        if b'"progress"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off at its beginning, or not written out yet
            if isinstance(event, dict) and event.get("event") == "progress":
                return event
    return None


def last_sign(root: Path, run_id: str) -> float | None:
    """When a run last wrote anything of its own, in seconds since 1970."""
    folders = [root / run_id, root / run_id / "stages", *(root / STAGING).glob(f"{run_id}-*")]
    found = []
    for folder in folders:
        with suppress(OSError):
            found += [item.stat().st_mtime for item in folder.iterdir() if item.is_file()]
    return max(found, default=None)


def _end_of(path: Path, most: int) -> tuple[bytes, int]:
    """The last bytes of a file, and its size; nothing where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - most, 0))
            return file.read(most), size
    except OSError:
        return b"", 0
