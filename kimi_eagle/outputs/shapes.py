"""What several documents have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

closed = with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
"""Of a document that has these keys and no others."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A whole BLAKE3 digest."""
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")]
"""In UTC."""
Count = Annotated[int, Field(ge=0)]

Kind = str
"""Of a stage: one of the kinds that manifests have."""
Disposition = Literal[
    "executed", "reused", "reproduced", "failed", "running", "interrupted", "lost"
]
RunStatus = Literal["running", "done", "failed", "interrupted", "lost"]
ArtifactState = Literal["present", "evicted", "missing", "external"]
Action = Literal["run", "reuse", "depends"]


@closed
class Problem(TypedDict):
    """One thing that is wrong with a manifest."""

    path: list[str | int]
    """Keys and indices from the top."""
    message: str
    line: int | None
    column: int | None
    """From 1."""
    found: NotRequired[Any]
    """The value that is wrong, where there is one."""
    hint: str | None
    source: str | None
    """The `--set` that it came from, where it was one."""


@closed
class ErrorOutput(TypedDict):
    """Whatever the command: it was refused, with exit code 2."""

    status: Literal["error"]
    error: str
    """The message, as on standard error."""
    file: NotRequired[str]
    problems: NotRequired[list[Problem]]
    """Of a manifest, all of them."""


@closed
class StageDocument(TypedDict):
    """A stage of a run."""

    name: str
    kind: Kind
    disposition: Disposition
    key: Digest | None
    """None while its inputs are not made."""
    outputs: dict[str, Digest]
    """By role."""
    metrics: dict[str, Any]
    """Whatever the kind measures."""
    seconds: float | None
    resources: dict[str, Any]
    """`cpu_seconds`, `peak_memory_bytes` of its largest process, `bytes_written`, …"""
    error: str | None
    started_at: Time
    ended_at: Time | None


@closed
class StageOfRun(StageDocument):
    """A stage, and the run that it belongs to."""

    run: RunId


@closed
class RunDocument(TypedDict):
    """A run."""

    id: RunId
    name: str
    """Of its manifest."""
    kind: Literal["submit", "reproduce"]
    status: RunStatus
    """`lost`: its coordinator is dead."""
    manifest_digest: Digest
    manifest_path: str
    started_at: Time
    ended_at: Time | None
    host: str
    pid: int


@closed
class RunWithStages(RunDocument):
    """A run and its stages, in the order of its manifest."""

    stages: list[StageDocument]
