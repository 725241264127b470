"""What is printed by the commands that make, plan and run."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kimi_eagle.outputs.shapes import (
    Action,
    Count,
    Digest,
    Disposition,
    Kind,
    RunId,
    RunStatus,
    closed,
)


@closed
class InitOutput(TypedDict):
    """`init`"""

    status: Literal["written"]
    manifest: str
    """The file."""
    found: dict[str, str]
    """What of the verifier was found, in words."""
    assumed: list[str]
    to_do: list[str]
    """What is left to fill in or put right."""


@closed
class ValidateOutput(TypedDict):
    """`validate`"""

    status: Literal["valid"]
    digest: Digest
    """Of the manifest: equal for those that make the same."""
    verifier_checked: bool
    """Whether the verifier's folder is on this machine."""
    resolved: dict[str, Any]
    """The manifest with every default written out."""


@closed
class ForecastDocument(TypedDict):
    """What a stage would write of hidden states."""

    rows: Count | None
    """Those that the store lacks; None where nothing tells."""
    tokens: Count
    bytes: Count
    estimate: bool
    basis: str | None
    """What an estimate rests on."""
    free_bytes: Count
    trouble: str | None
    """Why it does not fit."""


@closed
class ExpectedDocument(TypedDict):
    """What a stage would take."""

    tokens: Count
    """That it passes through the engine, or through the trainer over all epochs."""
    tokens_per_second: float
    seconds: float
    basis: str
    """What the rate was taken from."""
    gpus: Count
    """That it has all the time, all workers together; 0 where the manifest names none."""
    gpu_hours: float


@closed
class WeightsDocument(TypedDict):
    """The verifier's weights on the GPUs of an engine that would be started."""

    bytes: Count
    gpus: Count
    """That share them."""
    bytes_per_gpu: Count
    usable_bytes: Count | None
    """What the engine may use of each GPU; None where nobody says how much memory those have."""
    basis: str
    trouble: str | None
    """Why they do not fit."""


@closed
class PlannedStage(TypedDict):
    """A stage that is planned."""

    name: str
    kind: Kind
    action: Action
    key: Digest | None
    reasons: list[str]
    outputs: dict[str, Digest]
    """Of the execution that is reused."""
    forecast: NotRequired[ForecastDocument]
    expected: NotRequired[ExpectedDocument]
    unknown: NotRequired[str]
    """Why it is not known how long an extraction or a training takes, and what to do."""
    writes_bytes: NotRequired[Count]
    """About how much it writes besides hidden states."""
    weights: NotRequired[WeightsDocument]


@closed
class PlannedDisk(TypedDict):
    """What all stages that are not reused would write; hidden states may be counted, the rest is
    an estimate."""

    bytes: Count
    states_bytes: Count
    """Of these, hidden states."""
    free_bytes: Count
    trouble: str | None
    """Why it does not fit all together."""


@closed
class PlanOutput(TypedDict):
    """`plan`"""

    stages: list[PlannedStage]
    lacking: list[str]
    """What is not on this machine of records, weights and tokenizer, in words."""
    disk: PlannedDisk


@closed
class WhyStage(TypedDict):
    """What made a stage's key another."""

    name: str
    kind: Kind
    action: Action
    key: Digest | None
    against: RunId | None
    """The earlier run that it is compared with."""
    reasons: list[str]


@closed
class WhyOutput(TypedDict):
    """`why`"""

    stages: list[WhyStage]


@closed
class SubmittedStage(TypedDict):
    """How a stage came out."""

    name: str
    kind: Kind
    disposition: Disposition
    key: Digest
    outputs: dict[str, Digest]
    metrics: dict[str, Any]
    seconds: float
    error: NotRequired[str]


@closed
class SubmitOutput(TypedDict):
    """`submit` and `attach`, at the end of a run"""

    run_id: RunId
    status: RunStatus
    stages: list[SubmittedStage]


@closed
class RunStatusOutput(TypedDict):
    """`submit --detach` and `cancel`"""

    run_id: RunId
    status: RunStatus


@closed
class ReproducedStage(TypedDict):
    """How a stage that was made again came out."""

    name: str
    kind: Kind
    status: Literal["reused", "identical", "within_tolerance", "differs", "cannot", "interrupted"]
    expected: Digest
    found: Digest | None
    differences: list[dict[str, Any]]
    """By tensor, by field, by rows of states, or by the losses that part; see `comparison`."""
    error: str | None


@closed
class EnvironmentChange(TypedDict):
    """A part of the environment that is not as it was."""

    name: str
    then: Any
    now: Any
    text: str
    stages: list[str]


@closed
class ChangedEnvironment(TypedDict):
    """What of the environment changed."""

    changed: list[EnvironmentChange]


@closed
class ReproduceOutput(TypedDict):
    """`reproduce`"""

    status: Literal["reused", "identical", "within_tolerance", "differs", "cannot", "interrupted"]
    """`cannot`: exit code 2, nothing was run."""
    hash: str
    run_id: RunId | None
    stages: list[ReproducedStage]
    environment: ChangedEnvironment
    warnings: list[str]
    inputs: NotRequired[list[dict[str, Any]]]
    """Of `cannot`: inputs that are missing or others, with both hashes."""
    error: NotRequired[str]
