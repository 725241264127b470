"""The job of one stage: JSON in, events as it goes, JSON out. Pure but for its own files.

A job folder holds `job.json` (what to do), `events.ndjson` (appended while it runs), `out/<role>/`
(what it makes) and `result.json` (written last, whole or not at all).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json

JOB = "job.json"
EVENTS = "events.ndjson"
RESULT = "result.json"
OUT = "out"
SHARDS = "shards"
ANSWERS = "answers"
SNAPSHOTS = "snapshots"

# Which share of a stage's rows, from 0, and of how many.
Share = tuple[int, int]

# A worker's exit code when the disk is full: then it may have no other way to say so.
NO_SPACE = 28


@dataclass(frozen=True)
class Given:
    """An input as a worker finds it."""

    digest: str
    path: str
    label: str = ""


@dataclass(frozen=True)
class Job:
    """What a worker is told."""

    stage: str
    kind: str
    params: Mapping[str, Any]
    inputs: Mapping[str, tuple[Given, ...]]
    verifier: str
    folder: str
    root: str
    registry: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    saves: bool = False
    """Whether what is saved on the way is taken into the store."""
    share: Share | None = None
    """The part of the rows that is to be done, and nothing else: no artifact is made."""
    parts: Sequence[Mapping[str, Any]] = ()
    """The figures of workers that did a part each, when all that is left is to list it."""

    def write(self) -> Path:
        path = Path(self.folder) / JOB
        write_json(path, asdict(self))
        return path

    @staticmethod
    def read(path: Path) -> Job:
        value = json.loads(path.read_text("utf-8"))
        value["inputs"] = {
            role: tuple(Given(**item) for item in items) for role, items in value["inputs"].items()
        }
        return Job(**value)


class StageFailed(Exception):
    """A stage cannot go on; the message says what failed, where, and what to do."""


class EventWriter:
    """Appends events, one JSON object a line; several processes may append to one file."""

    def __init__(self, path: Path):
        self._path = path

    def emit(self, event: str, **values: Any) -> None:
        line = json.dumps(_finite({"event": event, **values})) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode("utf-8"))
        finally:
            os.close(descriptor)

    def progress(self, done: int, total: int, unit: str, **values: Any) -> None:
        self.emit("progress", done=done, total=total, unit=unit, **values)

    def note(self, text: str) -> None:
        """Something a person should read."""
        self.emit("note", text=text)


class EventReader:
    """Reads the events that were appended since it last looked."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0

    @property
    def offset(self) -> int:
        """How many bytes were read."""
        return self._offset

    def new(self) -> Iterator[dict[str, Any]]:
        for line in self.lines():
            yield json.loads(line)

    def lines(self) -> list[bytes]:
        """The new events as they were written."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return data[:whole].splitlines()


def _finite(value: Any) -> Any:
    """The value with null for what JSON has no number for (a loss that diverged)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_result(folder: Path, metrics: Mapping[str, Any]) -> None:
    write_json(folder / RESULT, {"metrics": _finite(metrics)})


def write_failure(folder: Path, error: str) -> None:
    write_json(folder / RESULT, {"error": error})


def read_result(folder: Path) -> dict[str, Any] | None:
    """What the worker reported; None when it died before it could."""
    try:
        value = json.loads((folder / RESULT).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
