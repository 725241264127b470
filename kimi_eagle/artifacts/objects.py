"""The object store: `objects/<2>/<digest>/` holds an artifact's files, `<digest>.json` its record.

An artifact is staged on the same file system, digested, made to last, and published by one
rename; nothing under a final name is ever half written. The record beside it is the truth from
which the registry can be made again.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import inside, sync_folder, sync_tree, write_json
from kimi_eagle.identity import digest_tree
from kimi_eagle.records import ArtifactRecord

STAGING = ".staging"


class Objects:
    """The objects under one root."""

    def __init__(self, root: Path, digests: Digests):
        self.root = root
        self._digests = digests

    def path(self, digest: str) -> Path:
        """The folder of an artifact, whether it is there or not."""
        return self.root / "objects" / digest[:2] / digest

    def record_path(self, digest: str) -> Path:
        return self.path(digest).with_suffix(".json")

    def describe(self, staged: Path, kind: str) -> ArtifactRecord:
        """The record of a staged folder: every file digested.

        Raises:
            ValueError: the folder is empty or holds something that is not a plain file.
        """
        files: dict[str, tuple[str, int]] = {}
        for folder, folders, names in os.walk(staged):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            for name in names + links:
                path = Path(folder) / name
                if path.is_symlink() or not path.is_file():
                    raise ValueError(
                        f"{path} is not a plain file: it cannot be part of an artifact"
                    )
                files[path.relative_to(staged).as_posix()] = self._digests.of(path)
        if not files:
            raise ValueError(f"the {kind} artifact is empty: {staged} holds no file")
        digest = digest_tree(kind, files)
        return ArtifactRecord(digest, kind, sum(size for _, size in files.values()), files)

    def publish(self, staged: Path, record: ArtifactRecord, production: dict[str, Any]) -> None:
        """Give a staged folder its final name, with its record beside it.

        The same content is there already when a stage came out as before: then it is kept, and
        the staged copy goes. What is there but damaged makes room.
        """
        target = self.path(record.digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        for relative in record.files:
            inside(staged, relative).chmod(0o444)
        sync_tree(staged)
        if target.exists() and (self.trouble(record) is not None or self.strangers(record)):
            self._discard(target)
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(staged)
        else:
            for relative, (digest, _) in record.files.items():
                self._digests.remember(inside(target, relative), digest)
        sync_folder(target.parent)
        if not self.record_path(record.digest).exists():
            # Written where the object was staged: what a crash leaves half done is cleared there.
            written = staged.with_name(f"{record.digest}.json")
            write_json(
                written,
                {
                    "digest": record.digest,
                    "kind": record.kind,
                    "bytes": record.bytes,
                    "files": {path: list(entry) for path, entry in record.files.items()},
                    "made": production,
                },
            )
            written.rename(self.record_path(record.digest))
            sync_folder(target.parent)

    def trouble(self, record: ArtifactRecord) -> str | None:
        """Why an artifact cannot be used as it is on disk; None when it can."""
        folder = self.path(record.digest)
        if record.files and all(
            self._digests.stands(f"{folder}/{relative}", digest)
            for relative, (digest, _) in record.files.items()
        ):
            return None
        if not folder.is_dir():
            return f"{record.kind} {record.digest[:12]} is not in the store"
        for relative, (digest, _) in record.files.items():
            path = inside(folder, relative)
            try:
                found, _ = self._digests.of(path)
            except FileNotFoundError:
                return f"{record.kind} {record.digest[:12]}: {relative} is missing"
            except OSError as error:
                return f"{record.kind} {record.digest[:12]}: {relative}: {error.strerror or error}"
            if found != digest:
                return (
                    f"{record.kind} {record.digest[:12]}: {relative} was altered "
                    f"(expected {digest[:12]}, found {found[:12]})"
                )
        return None

    def strangers(self, record: ArtifactRecord) -> list[Path]:
        """What lies in an artifact's folder and is no part of it; a link never is, whatever it
        leads to."""
        folder = self.path(record.digest)
        known = {inside(folder, relative) for relative in record.files}
        known |= {parent for path in known for parent in path.parents}
        found = []
        for at, folders, names in os.walk(folder):
            for path in (Path(at) / name for name in names + folders):
                if path not in known or path.is_symlink():
                    found.append(path)
        return sorted(found)

    def _discard(self, folder: Path) -> None:
        """Take a damaged artifact out of the store at once, then delete it at leisure."""
        grave = self.root / STAGING / f"discarded-{folder.name[:12]}-{secrets.token_hex(4)}"
        grave.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another run was quicker
            folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
