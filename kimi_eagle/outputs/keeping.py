"""What is printed by the commands that check and keep what there is."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from kimi_eagle.outputs.shapes import ArtifactState, Count, Digest, Time, closed


@closed
class DamageDocument(TypedDict):
    """A file that is not as it was."""

    path: str
    what: str
    detail: str


@closed
class VerdictOfArtifact(TypedDict):
    """An artifact that was read whole."""

    digest: Digest
    kind: str
    state: ArtifactState
    bytes: Count
    damages: list[DamageDocument]


@closed
class VerifyOutput(TypedDict):
    """`verify`"""

    status: Literal["whole", "damaged"]
    files: Count
    bytes: Count
    artifacts: list[VerdictOfArtifact]
    stray: list[DamageDocument]
    """Damaged shards that no artifact that was looked at needs."""


@closed
class CheckRowsOutput(TypedDict):
    """`check-rows`"""

    status: Literal["equal", "differs"]
    hash: Digest
    endpoint: str
    model: str
    rows: Count
    prompts: Count
    mismatched: Count
    mismatches: list[dict[str, Any]]
    """The first of them: row, record, and the first token that differs or the server's error."""
    not_found: list[dict[str, Any]]
    not_found_count: Count


@closed
class MakeAgain(TypedDict):
    """What it would cost to make again what goes."""

    seconds: float
    cpu_seconds: float
    gpu_hours: float | None


@closed
class EvictedArtifact(TypedDict):
    """An artifact that goes."""

    digest: Digest
    kind: str
    bytes: Count
    last_used: Time
    seconds: float
    cpu_seconds: float | None
    gpu_seconds: float | None


@closed
class EvictedShard(TypedDict):
    """A shard of hidden states that goes."""

    digest: Digest
    bytes: Count
    rows: Count


@closed
class LeftoverDocument(TypedDict):
    """Something that nobody needs."""

    path: str
    bytes: Count
    why: str


@closed
class GcOutput(TypedDict):
    """`gc`"""

    status: Literal["done", "dry-run"]
    bytes_freed: Count
    """Or that would be."""
    store_bytes: Count
    make_again: MakeAgain
    evicted: list[EvictedArtifact]
    shards: list[EvictedShard]
    leftovers: list[LeftoverDocument]
    unknown: list[str]
    """Whole artifacts that are not in the registry; never touched."""
    pinned: Count
    held: Count
    """Artifacts that living runs hold."""


@closed
class PinOutput(TypedDict):
    """`pin` and `unpin`"""

    status: Literal["pinned", "unpinned"]
    digest: Digest
    kind: str
    state: ArtifactState
    note: str
    created_at: Time


@closed
class RegistryCheckOutput(TypedDict):
    """`registry check`"""

    status: Literal["ok", "problems"]
    registry: str
    revision: str | None
    rows: dict[str, Count]
    """By table."""
    problems: list[str]
    notes: list[str]


@closed
class RegistryRebuildOutput(TypedDict):
    """`registry rebuild`"""

    status: Literal["rebuilt", "problems"]
    registry: str
    rows: dict[str, Count]
    problems: list[str]
    """Records that could not be used."""
    aside: str | None
    """Where the one before is."""


@closed
class RegistryCopyOutput(TypedDict):
    """`registry backup` and `registry restore`"""

    status: Literal["backed up", "restored"]
    file: str
    bytes: Count
    runs: Count
    revision: str | None
    aside: str | None


@closed
class CheckDocument(TypedDict):
    """One thing that `doctor` looked at."""

    name: str
    state: Literal["ok", "warn", "broken", "absent"]
    found: str
    remedy: str


@closed
class DoctorOutput(TypedDict):
    """`doctor`"""

    status: Literal["usable", "broken"]
    checks: list[CheckDocument]


@closed
class ExchangedOutput(TypedDict):
    """`push` and `pull`"""

    digest: Digest
    kind: str
    bytes: Count
    moved: bool
    """Whether it was not there before."""
    executions: Count
    """Records of its lineage that came along."""
    shards: Count
    """Of hidden states, that were moved."""
    shard_bytes: Count
    url: str
