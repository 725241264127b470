"""What the system keeps books about, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What a training saves at a step is an output of it under this and the step; it is listed apart
# from what the stage is for.
SNAPSHOT_ROLE = "snapshot@"


@dataclass(frozen=True)
class ArtifactRecord:
    """An artifact: made by a stage, or pinned from outside (`state` external)."""

    digest: str
    kind: str
    bytes: int
    files: Mapping[str, tuple[str, int]]
    """Relative path → (digest, size in bytes)."""
    state: str = "present"
    label: str = ""
    """A name for people: the file's or folder's own, where there is one."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Of a folder of files that are artifacts themselves: path → digest."""


@dataclass(frozen=True)
class ShardRecord:
    """One shard of the state store: its rows in order."""

    digest: str
    bytes: int
    rows: tuple[tuple[str, int, int, str], ...]
    """(row key, first token in the shard, tokens, digest of the row's states)."""


@dataclass(frozen=True)
class ExecutionRecord:
    """One stage of one run."""

    id: int
    run_id: str
    stage: str
    kind: str
    key: str | None
    document: Mapping[str, Any] | None
    disposition: str
    reused_from: int | None
    metrics: Mapping[str, Any]
    resources: Mapping[str, Any]
    """What it took: `cpu_seconds`, `peak_memory_bytes` of its largest process, `bytes_written`."""
    environment: Mapping[str, Any]
    error: str | None
    seconds: float | None
    started_at: str
    ended_at: str | None
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class RunRecord:
    id: str
    name: str
    kind: str
    status: str
    manifest_digest: str
    manifest_path: str
    started_at: str
    ended_at: str | None
    host: str
    pid: int


@dataclass(frozen=True)
class Node:
    """An artifact in a lineage."""

    digest: str
    kind: str
    bytes: int
    state: str
    label: str


@dataclass(frozen=True)
class Edge:
    """`source` went into `target`, by `stage` (or as its member, then `stage` is None)."""

    source: str
    target: str
    stage: str | None
    role: str
