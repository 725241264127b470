"""The manifest: what a user writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from kimi_eagle.manifest.described import describe, subclasses
from kimi_eagle.manifest.execution import Execution, Local
from kimi_eagle.manifest.log_options import LogOptions
from kimi_eagle.manifest.matrix_schema import add_matrix
from kimi_eagle.manifest.planning import Planning, unknown_stages
from kimi_eagle.manifest.problem import FieldProblem, FieldProblems, closest
from kimi_eagle.sizes import parse_size
from kimi_eagle.stages.catalog import KINDS, AnyStage
from kimi_eagle.stages.contract import EXTERNAL_PATH, Model, Reference, references

_LISTED = 8

StageName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]


class VerifierSource(Model):
    """The verifier: a folder on this machine."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """Relative to the manifest, or absolute; what it holds is pinned by digest."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """The revision it was downloaded at, as a note: identity is the digest of the files."""


class Store(Model):
    """Where hidden states are kept. Nothing of it is part of any key."""

    quota: Annotated[str, Field(min_length=1)] | None = None
    """What hidden states may take under this root, `500GB` or `2TiB`: an extraction that would
    pass it is refused before it starts."""
    remote: Annotated[str, Field(min_length=1)] | None = None
    """A store elsewhere, `s3://bucket/folder`, that is looked into before a stage is made: what
    was pushed there by somebody is taken from there."""
    fetch_states: bool = False
    """Whether hidden states are taken from there too: they take terabytes."""

    @field_validator("quota")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @field_validator("remote")
    @classmethod
    def _holds_no_secret(cls, value: str | None) -> str | None:
        if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "a name or password in an address would be kept with every run: leave them to the "
                "environment (AWS_ACCESS_KEY_ID, AWS_PROFILE)"
            )
        return value

    @property
    def quota_bytes(self) -> int | None:
        return None if self.quota is None else parse_size(self.quota)


class Manifest(Model):
    """One training run: a verifier and the stages that make a draft for it."""

    version: Literal[1]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
    """Shown in the run history; not part of any key."""
    verifier: VerifierSource
    stages: Annotated[dict[StageName, AnyStage], Field(min_length=1)]
    """The stages by name; each names the stages it takes from."""
    store: Store = Store()
    executor: Execution = Local()
    """Where stages run. Nothing of it is part of any key."""
    logging: LogOptions = LogOptions()
    plan: Planning = Planning()

    @model_validator(mode="after")
    def _references_hold(self) -> Manifest:
        problems = [*reference_problems(self), *unknown_stages(self.plan, self.stages)]
        if problems:
            raise FieldProblems(problems)
        return self

    def upstream(self, name: str) -> tuple[tuple[str, str], ...]:
        """(role, stage) of what a stage takes from, in the order its kind declares them."""
        stage = self.stages[name]
        named = [(field, target) for field, _, target in references(stage)]
        for role, path in KINDS[stage.kind].inherits.items():
            source: str | None = name
            for field in path:
                source = getattr(self.stages[source], field, None) if source is not None else None
            if source is not None:
                named.append((role, source))
        return tuple(named)

    def order(self) -> tuple[str, ...]:
        """Stage names so that every stage comes after those it takes from, otherwise as written.

        There is always one: a kind takes only from kinds that come before it in the catalog.
        """
        done: dict[str, None] = {}
        waiting = list(self.stages)
        while waiting:
            ready = next(
                name
                for name in waiting
                if all(target in done for _, _, target in references(self.stages[name]))
            )
            done[ready] = None
            waiting.remove(ready)
        return tuple(done)


@dataclass(frozen=True)
class _Referring:
    """A stage as far as its references go; `kind` is None when it is none that there is."""

    kind: str | None
    targets: Mapping[str, str]
    """Field → the stage it names."""


def reference_problems(manifest: Manifest | Any) -> list[FieldProblem]:
    """What is wrong with the names by which stages take from each other.

    Takes a manifest, or a document that need not be a valid one: its other faults hide none here.
    """
    stages = _referring(manifest)
    problems = []
    for name, stage in stages.items():
        marks = _reference_fields(stage.kind)
        for field, target in stage.targets.items():
            wanted = marks[field].kinds
            other = stages.get(target)
            if other is not None and other.kind in (*wanted, None):
                continue
            fitting = [key for key, item in stages.items() if item.kind in wanted]
            path = ("stages", name, field)
            if other is None:
                near = closest(target, fitting) or closest(target, stages)
                hint = f"did you mean '{near}'?" if near else _named(fitting, wanted)
                problems.append(FieldProblem(path, f"there is no stage '{target}'", hint))
            else:
                message = (
                    f"must name a stage of kind {' or '.join(wanted)}; '{target}' is of kind "
                    f"{other.kind}"
                )
                problems.append(FieldProblem(path, message, _named(fitting, wanted)))
        problems += _wrong_measure(name, stage, stages)
    return problems


def _wrong_measure(
    name: str, stage: _Referring, stages: Mapping[str, _Referring]
) -> list[FieldProblem]:
    """An evaluation releases only the checkpoint that it measured."""
    evaluation, checkpoint = stage.targets.get("evaluation"), stage.targets.get("checkpoint")
    measured = stages.get(evaluation or "")
    if stage.kind != "export" or not checkpoint or measured is None or measured.kind != "evaluate":
        return []
    other = measured.targets.get("checkpoint")
    if other in (checkpoint, None) or checkpoint not in stages:
        return []  # what is not there is told of already
    message = f"'{evaluation}' evaluates '{other}', not '{checkpoint}'"
    hint = "release a checkpoint on an evaluation of its own"
    return [FieldProblem(("stages", name, "evaluation"), message, hint)]


def _referring(manifest: Manifest | Any) -> dict[str, _Referring]:
    if isinstance(manifest, Manifest):
        return {
            name: _Referring(stage.kind, {field: target for field, _, target in references(stage)})
            for name, stage in manifest.stages.items()
        }
    stages = manifest.get("stages") if isinstance(manifest, dict) else None
    found = {}
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        fields = stage if isinstance(stage, dict) else {}
        given = fields.get("kind")
        kind = given if isinstance(given, str) and given in KINDS else None
        named = {field: fields.get(field) for field in _reference_fields(kind)}
        targets = {field: target for field, target in named.items() if isinstance(target, str)}
        found[name] = _Referring(kind, targets)
    return found


def _reference_fields(kind: str | None) -> dict[str, Reference]:
    """The fields by which stages of a kind name others."""
    fields = KINDS[kind].params.model_fields if kind is not None else {}
    return {
        name: mark
        for name, field in fields.items()
        for mark in field.metadata
        if isinstance(mark, Reference)
    }


def _named(names: list[str], kinds: tuple[str, ...]) -> str:
    kind = " or ".join(kinds)
    if not names:
        return f"add a stage of kind {kind}"
    listed, more = ", ".join(names[:_LISTED]), len(names) - _LISTED
    return f"stages of kind {kind}: {listed}" + (f" and {more} more" if more > 0 else "")


def resolved(manifest: Manifest) -> dict[str, Any]:
    """The manifest with every default written out, as JSON types."""
    return manifest.model_dump(mode="json")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, for editors."""
    schema = Manifest.model_json_schema()
    describe(schema, *subclasses(Model))
    # Pydantic leaves names that do not match the pattern free to be anything.
    stages = schema["properties"]["stages"]
    stages["additionalProperties"] = False
    (stage,) = stages["patternProperties"].values()
    add_matrix(schema, stage)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kimi-eagle manifest",
        **{key: value for key, value in schema.items() if key != "title"},
    }
