"""Read a manifest file: text → document → overrides → validated `Manifest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kimi_eagle.identity import digest_document
from kimi_eagle.manifest.check import may_hold_mapping, validate
from kimi_eagle.manifest.document import Document, parse_leniently
from kimi_eagle.manifest.model import Manifest, reference_problems, resolved
from kimi_eagle.manifest.overrides import apply
from kimi_eagle.manifest.problem import UNSET, ManifestError, Problem


@dataclass(frozen=True)
class LoadedManifest:
    """A manifest, and where its parts stand in the file."""

    manifest: Manifest
    document: Document
    path: Path
    text: str
    overrides: tuple[str, ...]

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The manifest with every default written out, as JSON types."""
        return resolved(self.manifest)

    @property
    def digest(self) -> str:
        """Equal for manifests that say the same, whatever their spelling and their quota."""
        said = {name: value for name, value in self.resolved.items() if name != "store"}
        return digest_document("manifest/1", said)

    @property
    def folder(self) -> Path:
        """What relative paths of the manifest are relative to."""
        return self.path.parent

    def error(
        self, path: tuple[str | int, ...], message: str, hint: str | None = None
    ) -> ManifestError:
        """An error about one value of the manifest, found after validation."""
        return ManifestError(str(self.path), [self.document.problem(path, message, hint=hint)])


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedManifest:
    """Read, override and validate a manifest.

    Raises:
        ManifestError: with every problem of the file at once.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError(
            str(path), [Problem(path=(), message=f"cannot be read: {reason}")]
        ) from None
    document, refused = parse_leniently(data, str(path))
    if overrides:
        document = apply(document, overrides, partial(may_hold_mapping, Manifest))
    try:
        manifest = validate(Manifest, document)
    except ManifestError as error:
        problems = _with_references(document, error.problems)
        raise ManifestError(str(path), _without_echoes(document, refused, problems)) from None
    if refused:
        raise ManifestError(str(path), refused)
    return LoadedManifest(manifest, document, path, data.decode("utf-8-sig"), tuple(overrides))


def _with_references(document: Document, problems: Sequence[Problem]) -> list[Problem]:
    """Add what is wrong with references, which is told only of a manifest without other faults."""
    known = {problem.path for problem in problems}
    return [*problems] + [
        document.problem(found.path, str(found), hint=found.hint)
        for found in reference_problems(document.data)
        if found.path not in known
    ]


def _without_echoes(
    document: Document, refused: Sequence[Problem], problems: Sequence[Problem]
) -> list[Problem]:
    """Leave out what is wrong only since a value or key on the same path was refused."""

    def echoes(problem: Problem, cause: Problem) -> bool:
        length = min(len(problem.path), len(cause.path))
        siblings = problem.path[:-1] == cause.path[:-1]
        if siblings and problem.found is UNSET and document.value(cause.path) is UNSET:
            return True  # the key that is missing may be the one that was refused
        return problem.path[:length] == cause.path[:length]

    return [
        *refused,
        *(p for p in problems if not any(echoes(p, cause) for cause in refused)),
    ]
