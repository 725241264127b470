"""The manifest: what a user writes. Pure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from kimi_eagle.manifest.problem import FieldProblem, FieldProblems
from kimi_eagle.stages.catalog import KINDS, AnyStage
from kimi_eagle.stages.contract import EXTERNAL_PATH, Model, references

StageName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]


class VerifierSource(Model):
    """The verifier: a folder on this machine."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """Relative to the manifest, or absolute; what it holds is pinned by digest."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """The revision it was downloaded at, as a note: identity is the digest of the files."""


class Manifest(Model):
    """One training run: a verifier and the stages that make a draft for it."""

    version: Literal[1]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
    """Shown in the run history; not part of any key."""
    verifier: VerifierSource
    stages: Annotated[dict[StageName, AnyStage], Field(min_length=1)]
    """The stages by name; each names the stages it takes from."""

    @model_validator(mode="after")
    def _references_hold(self) -> Manifest:
        problems = [*self._bad_references(), *self._bad_pairs()]
        if not problems:
            problems = self._cycles()
        if problems:
            raise FieldProblems(problems)
        return self

    def _bad_references(self) -> list[FieldProblem]:
        problems = []
        for name, stage in self.stages.items():
            for field, reference, target in references(stage):
                path = ("stages", name, field)
                other = self.stages.get(target)
                fitting = [key for key, item in self.stages.items() if item.kind == reference.kind]
                if other is None:
                    near = get_close_matches(target, self.stages, n=1)
                    hint = f"did you mean '{near[0]}'?" if near else _named(fitting, reference.kind)
                    problems.append(FieldProblem(path, f"there is no stage '{target}'", hint))
                elif other.kind != reference.kind:
                    problems.append(
                        FieldProblem(
                            path,
                            f"must name a stage of kind {reference.kind}; "
                            f"'{target}' is of kind {other.kind}",
                            _named(fitting, reference.kind),
                        )
                    )
        return problems

    def _bad_pairs(self) -> list[FieldProblem]:
        """An evaluation releases only the checkpoint that it measured."""
        problems = []
        for name, stage in self.stages.items():
            if stage.kind != "export":
                continue
            measured = self.stages.get(stage.evaluation)
            if measured is None or measured.kind != "evaluate":
                continue
            if measured.checkpoint != stage.checkpoint:
                problems.append(
                    FieldProblem(
                        ("stages", name, "evaluation"),
                        f"'{stage.evaluation}' evaluates '{measured.checkpoint}', "
                        f"not '{stage.checkpoint}'",
                        "release a checkpoint on an evaluation of its own",
                    )
                )
        return problems

    def _cycles(self) -> list[FieldProblem]:
        try:
            self.order()
        except ValueError as error:
            return [FieldProblem(("stages",), str(error))]
        return []

    def upstream(self, name: str) -> tuple[tuple[str, str], ...]:
        """(role, stage) of what a stage takes from, in the order its kind declares them."""
        stage = self.stages[name]
        named = [(field, target) for field, _, target in references(stage)]
        for role, (field, theirs) in KINDS[stage.kind].inherits.items():
            named.append((role, getattr(self.stages[getattr(stage, field)], theirs)))
        return tuple(named)

    def order(self) -> tuple[str, ...]:
        """Stage names so that every stage comes after those it takes from, otherwise as written.

        Raises:
            ValueError: stages that wait for each other.
        """
        done: dict[str, None] = {}
        waiting = list(self.stages)
        while waiting:
            ready = [
                name
                for name in waiting
                if all(target in done for _, _, target in references(self.stages[name]))
            ]
            if not ready:
                raise ValueError(f"stages wait for each other: {', '.join(waiting)}")
            done[ready[0]] = None
            waiting.remove(ready[0])
        return tuple(done)


def _named(names: list[str], kind: str) -> str:
    if not names:
        return f"add a stage of kind {kind}"
    return f"stages of kind {kind}: {', '.join(names)}"


def resolved(manifest: Manifest) -> dict[str, Any]:
    """The manifest with every default written out, as JSON types."""
    return manifest.model_dump(mode="json")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, for editors."""
    schema = Manifest.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kimi-eagle manifest",
        **{key: value for key, value in schema.items() if key != "title"},
    }
