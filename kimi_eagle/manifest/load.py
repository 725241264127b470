"""Read a manifest file: text → document → overrides → variants → validated `Manifest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kimi_eagle.identity import digest_document
from kimi_eagle.manifest.axes import MATRIX
from kimi_eagle.manifest.check import may_hold_mapping, validate
from kimi_eagle.manifest.document import Document, Json, parse_leniently
from kimi_eagle.manifest.matrix import Expansion, expand, may_hold_axis
from kimi_eagle.manifest.model import Manifest, reference_problems, resolved
from kimi_eagle.manifest.names import BETWEEN
from kimi_eagle.manifest.overrides import apply
from kimi_eagle.manifest.problem import UNSET, ManifestError, Problem
from kimi_eagle.manifest.problem import Path as Place
from kimi_eagle.stages.contract import OUTSIDE_KEY


@dataclass(frozen=True)
class LoadedManifest:
    """A manifest, and where its parts stand in the file."""

    manifest: Manifest
    document: Document
    """As it was written, and overridden: with `matrix` where a stage has one."""
    path: Path
    text: str
    overrides: tuple[str, ...]
    expansion: Expansion | None = None
    """How stages with a matrix, and those that take from them, became those of the manifest."""

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The manifest with every default written out, as JSON types."""
        return resolved(self.manifest)

    @property
    def digest(self) -> str:
        """Equal for manifests that make the same, whatever their spelling, their quota, where
        they run and where they log."""
        aside = ("executor", "logging", "plan", "store")
        said = {key: value for key, value in self.resolved.items() if key not in aside}
        said["stages"] = {
            name: {key: value for key, value in stage.items() if key != "resources"}
            for name, stage in said["stages"].items()
        }
        return digest_document("manifest/1", said)

    @property
    def folder(self) -> Path:
        """What relative paths of the manifest are relative to."""
        return self.path.parent

    def error(
        self, path: tuple[str | int, ...], message: str, hint: str | None = None
    ) -> ManifestError:
        """An error about one value of the manifest, found after validation."""
        origin = path if self.expansion is None else self.expansion.origin(path)
        return ManifestError(str(self.path), [self.document.problem(origin, message, hint=hint)])


def load(path: Path, overrides: Sequence[str] = (), text: str | None = None) -> LoadedManifest:
    """Read, override and validate a manifest.

    Args: `text`: what the file held once, to be taken in place of what it holds now.

    Raises:
        ManifestError: with every problem of the file at once.
    """
    try:
        data = path.read_bytes() if text is None else text.encode("utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError(
            str(path), [Problem(path=(), message=f"cannot be read: {reason}")]
        ) from None
    document, refused = parse_leniently(data, str(path))
    if overrides:
        document = apply(document, overrides, _may_hold)
    expansion = expand(document)
    try:
        manifest = validate(Manifest, expansion.document)
    except ManifestError as error:
        problems = _with_references(expansion, error.problems)
        refused = [*refused, *expansion.problems]
        raise ManifestError(str(path), _without_echoes(document, refused, problems)) from None
    refused = [*refused, *expansion.problems]
    refused += [] if refused else expansion.twins(lambda name: _counts(manifest.stages[name]))
    if refused:
        raise ManifestError(str(path), refused)
    read = data.decode("utf-8-sig")
    return LoadedManifest(manifest, document, path, read, tuple(overrides), expansion)


def _may_hold(data: Json, path: Place) -> bool:
    return may_hold_axis(data, path) or may_hold_mapping(Manifest, data, path)


def _counts(value: Any) -> Any:
    """All of a stage's parameters that decides what it makes, what it takes from included."""
    if isinstance(value, BaseModel):
        return {
            name: _counts(getattr(value, name))
            for name, field in type(value).model_fields.items()
            if OUTSIDE_KEY not in field.metadata
        }
    return [_counts(item) for item in value] if isinstance(value, list | tuple) else value


def _with_references(expansion: Expansion, problems: Sequence[Problem]) -> list[Problem]:
    """Add what is wrong with references, which is told only of a manifest without other faults.

    Where what is written names no variant it is judged as it is written, not by the variants.
    """
    known = {problem.path for problem in problems}
    found = [*problems] + [
        expansion.document.problem(wrong.path, str(wrong), hint=wrong.hint)
        for wrong in reference_problems(expansion.document.data)
        if wrong.path not in known
    ]
    if not expansion.variants:
        return found
    as_written = {
        wrong.path: expansion.source.problem(wrong.path, str(wrong), hint=wrong.hint)
        for wrong in reference_problems(expansion.source.data)
        if BETWEEN not in str(expansion.source.value(wrong.path))
    }
    told = [as_written.get(problem.path, problem) for problem in expansion.told(found)]
    return list({(problem.path, problem.message): problem for problem in told}.values())


def _without_echoes(
    document: Document, refused: Sequence[Problem], problems: Sequence[Problem]
) -> list[Problem]:
    """Leave out what is wrong only since a value or key on the same path was refused."""

    def echoes(problem: Problem, cause: Problem) -> bool:
        if cause.path[2:3] == (MATRIX,) and problem.found is UNSET:
            return problem.path[:2] == cause.path[:2]  # what is missing may be what would vary
        length = min(len(problem.path), len(cause.path))
        siblings = problem.path[:-1] == cause.path[:-1]
        if siblings and problem.found is UNSET and document.value(cause.path) is UNSET:
            return True  # the key that is missing may be the one that was refused
        return problem.path[:length] == cause.path[:length]

    return [
        *refused,
        *(p for p in problems if not any(echoes(p, cause) for cause in refused)),
    ]
