"""Read stored artifacts whole and compare every byte with the digests it goes by.

$ kimi-eagle verify --all
  ARTIFACT      KIND    STATE    BYTES   FOUND
  9c41e07a51c2  rows    present  1.2 MB  whole
  50aa3c18e0b4  states  missing  3.1 GB  states/7f/7f02….safetensors: altered (found 81d0c3…)

What was remembered of a file's digest is not asked, and is corrected: the next plan sees what is
found here. Damaged artifacts are marked `missing`, whole ones `present` and verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import inside
from kimi_eagle.artifacts.journal import DAMAGED, VERIFIED, note
from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.clock import now
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.store import Registry
from kimi_eagle.states.layout import ROWS, shard_path, stored_digests

STATES = "states"


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it should be."""

    path: str
    """Relative to the root."""
    what: str
    """`missing`, `altered`, `truncated`, `longer`, `extra`, `unreadable` or `rows`."""
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Verdict:
    """What was found of one artifact."""

    digest: str
    kind: str
    state: str
    """As the registry has it afterwards."""
    bytes: int
    """How much was read for it, its shards included."""
    damages: list[Damage] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "kind": self.kind,
            "state": self.state,
            "bytes": self.bytes,
            "damages": [
                {"path": item.path, "what": item.what, "detail": item.detail}
                for item in self.damages
            ],
        }


@dataclass
class Verification:
    """What `verify` found."""

    verdicts: list[Verdict]
    files: int
    bytes: int
    stray: list[Damage] = field(default_factory=list)
    """Damaged shards that no artifact that was looked at needs."""

    @property
    def whole(self) -> bool:
        return not self.stray and not any(verdict.damages for verdict in self.verdicts)

    def document(self) -> dict[str, Any]:
        """As `verify --json` prints it."""
        return {
            "status": "whole" if self.whole else "damaged",
            "files": self.files,
            "bytes": self.bytes,
            "artifacts": [verdict.document() for verdict in self.verdicts],
            "stray": [
                {"path": item.path, "what": item.what, "detail": item.detail} for item in self.stray
            ],
        }


@dataclass(frozen=True)
class _File:
    """A file and what it should be."""

    path: Path
    digest: str
    size: int


class Verifier:
    """Verifies artifacts under one root."""

    def __init__(self, root: Path):
        """Raises: RegistryError: there is no registry, or it cannot be used."""
        self.root = root.absolute()
        self.registry = Registry(self.root, create=False)
        self._keeper = Keeper(self.registry)
        self._digests = Digests(self.registry)
        self._objects = Objects(self.root, self._digests)

    def close(self) -> None:
        self.registry.close()

    def named(self, prefix: str) -> list[ArtifactRecord]:
        """The stored artifact that a hash names, or those of the run that it names.

        Raises:
            UnknownDigest, AmbiguousDigest.
            LookupError: it came from outside, and is not in the store.
        """
        digest, kind = self.registry.resolve(prefix)
        if kind == "run":
            wanted = set(self._keeper.outputs_of_run(digest))
            return [record for record in self._keeper.stored() if record.digest in wanted]
        (record,) = self._keeper.artifacts("digest = ?", digest)
        if record.state == "external":
            raise LookupError(
                f"{kind} {digest[:12]} ({record.label}) came from outside and is not in the store; "
                "it is checked whenever a manifest that names it is planned"
            )
        return [record]

    def verify(self, prefix: str | None) -> Verification:
        """Verify what a hash names; without one, everything in the store.

        Raises: as `named`.
        """
        with gate(self.root, shared=True):
            records = self._keeper.stored() if prefix is None else self.named(prefix)
            looked_at = [r for r in records if r.state != "evicted" or self._there(r)]
            evicted = [r for r in records if r not in looked_at]
            shards = self._shards(looked_at, everything=prefix is None)
            files = {
                record.digest: [
                    _File(inside(self._objects.path(record.digest), path), digest, size)
                    for path, (digest, size) in record.files.items()
                ]
                for record in looked_at
            }
            every = [file for items in files.values() for file in items] + list(shards.values())
            found = self._read(every)
            verdicts = [self._verdict(record, files[record.digest], found) for record in looked_at]
            needed = self._judge_rows(verdicts, shards, found)
            self._record(verdicts)
        verdicts += [Verdict(r.digest, r.kind, "evicted", 0) for r in evicted]
        stray = [found[s.path] for digest, s in shards.items() if digest not in needed]
        return Verification(
            sorted(verdicts, key=lambda verdict: verdict.digest),
            len(every),
            sum(file.size for file in every),
            [item for item in stray if item is not None],
        )

    def _there(self, record: ArtifactRecord) -> bool:
        return self._objects.path(record.digest).is_dir()

    def _shards(self, records: Sequence[ArtifactRecord], *, everything: bool) -> dict[str, _File]:
        """The shards to read: those that hold rows of these artifacts, or all."""
        wanted = {shard for r in records for _, shard in self._rows_of(r.digest, r.kind).values()}
        return {
            shard.digest: _File(shard_path(self.root, shard.digest), shard.digest, shard.bytes)
            for shard in self._keeper.shards()
            if everything or shard.digest in wanted
        }

    def _rows_of(self, digest: str, kind: str) -> dict[str, tuple[str, str]]:
        """(content digest, shard) by key of an artifact's rows, as the state store has them."""
        listed = self._listed(digest) if kind == STATES else None
        return self._keeper.rows(list(listed)) if listed else {}

    def _listed(self, digest: str) -> dict[str, str] | None:
        """Content digest by key, as a states artifact lists its rows; None when it is damaged."""
        try:
            text = (self._objects.path(digest) / ROWS).read_text("utf-8")
            return stored_digests(text)
        except (OSError, ValueError):
            return None

    def _read(self, files: Iterable[_File]) -> dict[Path, Damage | None]:
        """Read files, several at once; the largest first, so that none is left over alone."""
        order = sorted(files, key=lambda file: -file.size)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            damages = list(pool.map(self._damage, order))
        self._digests.flush()
        return {file.path: damage for file, damage in zip(order, damages, strict=True)}

    def _damage(self, file: _File) -> Damage | None:
        name = file.path.relative_to(self.root).as_posix()
        try:
            if file.path.is_symlink() or not file.path.is_file():
                if not file.path.exists():
                    return Damage(name, "missing", "")
                return Damage(name, "altered", "not a plain file")
            digest, size = self._digests.afresh(file.path)
        except FileNotFoundError:
            return Damage(name, "missing", "")
        except OSError as error:
            return Damage(name, "unreadable", error.strerror or str(error))
        if digest == file.digest:
            return None
        if size == file.size:
            return Damage(name, "altered", f"found {digest}")
        what = "truncated" if size < file.size else "longer"
        return Damage(name, what, f"{size} of {file.size} bytes")

    def _verdict(
        self, record: ArtifactRecord, files: Sequence[_File], found: dict[Path, Damage | None]
    ) -> Verdict:
        """What an artifact's own folder holds."""
        verdict = Verdict(record.digest, record.kind, "", sum(file.size for file in files))
        if not self._there(record):
            name = self._objects.path(record.digest).relative_to(self.root).as_posix()
            verdict.damages.append(Damage(name, "missing", "the whole folder"))
            return verdict
        verdict.damages += [damage for file in files if (damage := found[file.path]) is not None]
        known = {file.path for file in files}
        for path in (path for path in self._objects.strangers(record) if path not in known):
            verdict.damages.append(Damage(path.relative_to(self.root).as_posix(), "extra", ""))
        return verdict

    def _judge_rows(
        self,
        verdicts: Sequence[Verdict],
        shards: dict[str, _File],
        found: dict[Path, Damage | None],
    ) -> set[str]:
        """Add to the verdicts on states what is wrong with their rows; returns the shards that
        hold them."""
        needed: set[str] = set()
        for verdict in verdicts:
            listed = self._listed(verdict.digest) if verdict.kind == STATES else None
            if listed is None:
                continue
            held = self._keeper.rows(list(listed))
            name = (self._objects.path(verdict.digest) / ROWS).relative_to(self.root).as_posix()
            gone = sum(key not in held for key in listed)
            other = sum(held[key][0] != digest for key, digest in listed.items() if key in held)
            if gone:
                detail = f"{gone} of {len(listed)} rows are not stored"
                verdict.damages.append(Damage(name, "rows", detail))
            if other:
                detail = f"{other} of {len(listed)} rows are stored as other bytes"
                verdict.damages.append(Damage(name, "rows", detail))
            holding = {shard for _, shard in held.values()}
            for digest in sorted(holding):
                damage = found[shards[digest].path]
                verdict.bytes += shards[digest].size
                if damage is not None:
                    verdict.damages.append(damage)
            needed |= holding
        return needed

    def _record(self, verdicts: Sequence[Verdict]) -> None:
        """Say in the journal and in the registry what was found."""
        whole = [verdict.digest for verdict in verdicts if not verdict.damages]
        damaged = [verdict.digest for verdict in verdicts if verdict.damages]
        for verdict in verdicts:
            verdict.state = "missing" if verdict.damages else "present"
        at = now()
        if whole:
            note(self.root, VERIFIED, whole, at=at)
        if damaged:
            note(self.root, DAMAGED, damaged, at=at)
        self._keeper.record_check(at, whole, damaged)
