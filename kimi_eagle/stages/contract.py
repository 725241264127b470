"""What every stage kind declares: its parameters, inputs, output and determinism. Pure.

The parameters of a kind are a frozen pydantic model; markers on its fields say what a field is:

- `Reference("prepare")`: the name of another stage whose output this one takes; of several kinds
  where these make the same sort of artifact;
- `OUTSIDE_KEY`: placement (host, device count, ports, workers): never part of the stage key;
- `EXTERNAL_PATH`: a path on this machine: what it holds is pinned by digest, the path is not keyed.

Everything else is identity and enters the stage key, with defaults filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kimi_eagle.sizes import parse_seconds, parse_size


class Model(BaseModel):
    """A part of a manifest: frozen, strict, and closed to unknown keys.

    Docstrings below fields describe them in the JSON Schema (see `manifest.described`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Reference:
    """Marks a field that names a stage of one of the given kinds, whose outputs are alike."""

    kinds: tuple[str, ...]

    def __init__(self, *kinds: str):
        object.__setattr__(self, "kinds", kinds)


class _Marker(Enum):
    OUTSIDE_KEY = "outside the stage key"
    EXTERNAL_PATH = "a path, pinned by what it holds"


OUTSIDE_KEY = _Marker.OUTSIDE_KEY
EXTERNAL_PATH = _Marker.EXTERNAL_PATH


class Resources(Model):
    """What a stage needs of where it runs, checked before anything starts. Nothing of it is part of
    any key."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs on each node. On this machine the stage is given free ones by id, and waits for them."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs on each node. On this machine, stages that all say this run side by side where they
    fit; one that does not has the machine to itself."""
    memory: Annotated[str, Field(min_length=1)] | None = None
    """On each node: `64GB`, `1.5TiB`."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Machines; more than one for training alone."""
    workers: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """Over how many workers the rows of `extract` and `regenerate` are shared out, each with the
    rest of these; `all` for as many as there is room for."""
    time: Annotated[str, Field(min_length=1)] | None = None
    """The longest it may take, `90m`, `12h`, `2d` or `H:MM:SS`: what a scheduler is told."""

    @field_validator("memory")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @field_validator("time")
    @classmethod
    def _is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            parse_seconds(value)
        return value


class StageParams(Model):
    """The parameters of one stage; each kind narrows `kind` to its own name."""

    kind: str
    resources: Annotated[Resources, OUTSIDE_KEY] = Resources()


@dataclass(frozen=True)
class SourceFiles:
    """An input outside the store: a file or a glob, pinned by the digests of the files."""

    path: str
    records: bool = True
    """Whether they are files of records, in one of the forms that are read; so may a folder be."""


@dataclass(frozen=True)
class VerifierFiles:
    """The verifier folder, or just the part of it that makes its tokenizer and chat template."""

    part: Literal["whole", "tokenizer"]


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact of this registry that an earlier run made, named by the start of its hash."""

    prefix: str
    kind: str


External = SourceFiles | VerifierFiles | StoredArtifact


@dataclass(frozen=True)
class Determinism:
    """How far a second run of the same key comes out the same.

    `bitwise`: equal bytes anywhere; `bitwise-like-hardware`: equal bytes on the same kind of
    processor and the same packages; `tolerance`: within `bound` (what it bounds is in `measure`).
    """

    level: Literal["bitwise", "bitwise-like-hardware", "tolerance"]
    measure: str = ""
    bound: float | None = None


class StageKind:
    """A kind of stage; subclasses in `stages/<kind>/spec.py` fill the class variables in.

    `code_version` is raised whenever the kind's code comes to make other bytes from the same
    inputs: it is part of every stage key.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    params: ClassVar[type[StageParams]]
    output: ClassVar[str]
    code_version: ClassVar[int]
    determinism: ClassVar[Determinism]
    inherits: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Inputs taken from the same stage as another one took them from: role → (reference, its
    reference, …). Training reads the rows that its states were extracted for. Where one on the
    way is not given, there is no such input."""
    settings: ClassVar[Mapping[str, str]] = {}
    """Environment variables of its worker's process and of no other, whatever else they are set to:
    what libraries read before any code of ours runs."""

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        """The inputs that come from outside the store, by role."""
        return {}

    @classmethod
    def again(cls, params: Any) -> Any:
        """The parameters with which an output is made once more to be compared: those of the
        stage, but for what it does besides its output."""
        return params

    @classmethod
    def identity(cls, params: Any, facts: Any) -> dict[str, Any]:
        """The identity parameters, resolved against the verifier's facts where they default to
        something that only the verifier knows."""
        return identity_of(params)


def identity_of(model: BaseModel) -> dict[str, Any]:
    """A model's fields that belong in a key, recursively, with defaults filled in."""
    found: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        if name == "kind" and isinstance(model, StageParams):
            continue  # the key carries the kind once, beside the parameters
        if any(isinstance(mark, Reference | _Marker) for mark in field.metadata):
            continue
        found[name] = _identity_value(getattr(model, name))
    return found


def _identity_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return identity_of(value)
    if isinstance(value, list | tuple):
        return [_identity_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _identity_value(item) for key, item in value.items()}
    return value


def references(params: StageParams) -> Iterator[tuple[str, Reference, str]]:
    """Every reference a stage makes: (field, what it must be, the name given)."""
    for name, field in type(params).model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Reference):
                given = getattr(params, name)
                if given is not None:
                    yield name, mark, given
