"""What is printed by the commands that ask what there is."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kimi_eagle.outputs.shapes import (
    ArtifactState,
    Count,
    Digest,
    Disposition,
    RunDocument,
    RunId,
    RunWithStages,
    StageDocument,
    StageOfRun,
    Time,
    closed,
)


@closed
class RunsOutput(TypedDict):
    """`runs`: newest first"""

    runs: list[RunWithStages]


@closed
class ShownRun(RunDocument):
    """`show` of a run"""

    type: Literal["run"]
    stages: list[StageDocument]
    manifest: str
    """Its text."""
    overrides: list[str]
    """As `--set` gave them."""
    resolved: dict[str, Any]
    environment: dict[str, Any]


@closed
class FileDocument(TypedDict):
    """A file of an artifact."""

    digest: Digest
    bytes: Count


@closed
class PinnedSince(TypedDict):
    """A pin."""

    since: Time
    note: str | None


@closed
class BucketDocument(TypedDict):
    """Records with one fate."""

    records: Count
    examples: list[dict[str, Any]]


@closed
class ShownArtifact(TypedDict):
    """`show` of an artifact"""

    type: Literal["artifact"]
    digest: Digest
    kind: str
    bytes: Count
    state: ArtifactState
    label: str
    created_at: Time
    verified_at: Time | None
    pinned: PinnedSince | None
    files: dict[str, FileDocument]
    producers: list[StageOfRun]
    consumers: list[StageOfRun]
    buckets: NotRequired[dict[str, BucketDocument]]
    """Of rows: what became of the records."""


@closed
class ShownKey(TypedDict):
    """`show` of a stage key"""

    type: Literal["stage key"]
    digest: Digest
    document: dict[str, Any] | None
    """What the key is the digest of."""
    stages: list[StageOfRun]


@closed
class ShownManifest(TypedDict):
    """`show` of a manifest's digest"""

    type: Literal["manifest"]
    digest: Digest
    runs: list[RunDocument]


@closed
class HolderDocument(TypedDict):
    """An artifact that has a file in it."""

    artifact: Digest
    path: str


@closed
class ShownFile(TypedDict):
    """`show` of a file inside artifacts"""

    type: Literal["file of an artifact"]
    digest: Digest
    holders: list[HolderDocument]


@closed
class ShownShard(TypedDict):
    """`show` of a shard of hidden states"""

    type: Literal["shard"]
    digest: Digest
    bytes: Count
    rows: Count
    tokens: Count
    created_at: Time


@closed
class ShownStates(TypedDict):
    """`show` of a row of hidden states, by its key"""

    type: Literal["row"]
    digest: Digest
    """Of its states."""
    shard: Digest
    start: Count
    """Its first token in the shard."""
    tokens: Count


@closed
class RowSource(TypedDict):
    """Where a row came from."""

    file: str
    record: Count
    line: int | None


@closed
class Span(TypedDict):
    """A piece of a row's text."""

    supervised: bool
    text: str


@closed
class ShownRow(TypedDict):
    """`show --row N`"""

    type: Literal["row"]
    row: Count
    rows: Count
    split: str
    source: RowSource
    token_ids: list[int]
    loss_mask: list[int]
    tokens: list[str]
    spans: list[Span]


@closed
class Training(TypedDict):
    """A training's curves."""

    stage: str
    run: RunId
    curves: dict[str, list[tuple[int, float | None]]]
    """Tag → (optimizer step, value)."""


@closed
class ShownCurves(TypedDict):
    """`show --plot`"""

    trainings: list[Training]


ShowOutput = (
    ShownRun
    | ShownArtifact
    | ShownKey
    | ShownManifest
    | ShownFile
    | ShownShard
    | ShownStates
    | ShownRow
    | list[ShownRow]
    | ShownCurves
)


@closed
class NodeDocument(TypedDict):
    """An artifact of a lineage."""

    digest: Digest
    kind: str
    bytes: Count
    state: ArtifactState
    label: str


# `from` is no name in Python.
EdgeDocument = TypedDict(
    "EdgeDocument", {"from": Digest, "to": Digest, "stage": str | None, "role": str}
)
closed(EdgeDocument)


@closed
class LineageOutput(TypedDict):
    """`lineage`; an edge without a stage leads from a file to the folder that it is part of"""

    nodes: list[NodeDocument]
    edges: list[EdgeDocument]


@closed
class Trial(TypedDict):
    """A training of a run."""

    rank: Count | None
    """None for one that has no value."""
    stage: str
    disposition: Disposition
    checkpoint: Digest | None
    val_loss: float | None
    evaluation: str | None
    acceptance_length: float | None
    settings: dict[str, Any]
    """Those that differ between the trainings."""


@closed
class RankOutput(TypedDict):
    """`rank`: the best first"""

    run_id: RunId
    by: str
    varied: list[str]
    warnings: list[str]
    trials: list[Trial]


@closed
class SideDocument(TypedDict):
    """One of the two that are compared."""

    name: str
    kind: str


@closed
class VerdictDocument(TypedDict):
    """Whether figures can be compared."""

    comparable: bool
    reasons: list[str]
    warnings: list[str]


@closed
class LeafDocument(TypedDict):
    """A value on both sides."""

    section: str
    name: str
    a: Any
    b: Any


@closed
class TensorDocument(TypedDict):
    """A tensor's norms: of both sides, of the difference, and that relative to `a`."""

    name: str
    a: float | None
    b: float | None
    difference: float | None
    relative: float | None
    note: str | None


@closed
class DiffOutput(TypedDict):
    """`diff`"""

    a: SideDocument
    b: SideDocument
    verdict: VerdictDocument
    differences: list[LeafDocument]
    """With `--all` also what is equal."""
    equal: Count
    weights: NotRequired[list[TensorDocument]]


@closed
class ComparedEvaluation(TypedDict):
    """A column of `compare`."""

    name: str
    digest: Digest
    checkpoint: Digest | None
    simulated_acceptance_length: float | None
    simulated_gap: float | None


@closed
class ComparedFigures(TypedDict):
    """What an evaluation measured on a line."""

    acceptance_length: float | None
    """Tokens committed per draft step, pooled, the bonus token included."""
    acceptance_length_per_request: float | None
    standard_error: float | None
    per_position: list[float] | None
    draft_steps: Count | None
    prompts: Count | None
    outputs_equal: Count | None
    speedup: float | None


@closed
class ComparedLine(TypedDict):
    """A row of `compare`."""

    set: str
    draft_tokens: Count
    temperature: float
    batch: Count
    published: list[float] | None
    """The least and the greatest of published Kimi drafts."""
    figures: list[ComparedFigures | None]
    """In the order of the evaluations."""


@closed
class CompareOutput(TypedDict):
    """`compare`"""

    evaluations: list[ComparedEvaluation]
    lines: list[ComparedLine]
    notes: list[str]


@closed
class ReportOutput(TypedDict):
    """`report`: what was written"""

    run: RunId
    file: str
    bytes: Count
