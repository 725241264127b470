"""Read a manifest file: text → document → overrides → validated `Manifest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.identity import digest_document
from kimi_eagle.manifest.check import validate
from kimi_eagle.manifest.document import Document, parse
from kimi_eagle.manifest.model import Manifest, resolved
from kimi_eagle.manifest.overrides import apply
from kimi_eagle.manifest.problem import ManifestError, Problem


@dataclass(frozen=True)
class LoadedManifest:
    """A manifest, and where its parts stand in the file."""

    manifest: Manifest
    document: Document
    path: Path
    text: str
    overrides: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Equal for manifests that say the same, whatever their spelling."""
        return digest_document("manifest/1", resolved(self.manifest))

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
    document = parse(data, str(path))
    if overrides:
        document = apply(document, list(overrides))
    manifest = validate(Manifest, document)
    return LoadedManifest(manifest, document, path, data.decode("utf-8-sig"), tuple(overrides))
