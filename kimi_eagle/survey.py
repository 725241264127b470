"""What lies on disk under a root, against what the registry knows of it. Reads names and sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.eviction import alive as alive
from kimi_eagle.eviction import owner_of
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Keeper

OBJECTS, STATES = "objects", "states"


@dataclass(frozen=True)
class Leftover:
    """Something under the root that nobody needs."""

    path: Path
    bytes: int
    why: str


@dataclass
class Survey:
    """Everything that disk and registry do not agree on."""

    absent: list[ArtifactRecord] = field(default_factory=list)
    """Artifacts that should be there and are not."""
    absent_shards: list[str] = field(default_factory=list)
    """Shards that rows are looked for in, gone or of another size."""
    unknown: list[Path] = field(default_factory=list)
    """Artifacts and shards with a whole record of their own that the registry lacks altogether:
    `registry rebuild` takes them in."""
    leftovers: list[Leftover] = field(default_factory=list)


def survey(root: Path, keeper: Keeper) -> Survey:
    """Compare disk and registry.

    While a run lives, what nobody names may be just about to be recorded: only what belongs to
    dead runs in the staging folder is a leftover then.
    """
    found = Survey()
    living = alive(root)
    stored = {record.digest: record for record in keeper.stored()}
    for record in stored.values():
        if record.state == "present" and not _object(root, record.digest).is_dir():
            found.absent.append(record)
    shards = {shard.digest: shard for shard in keeper.shards()}
    for shard in shards.values():
        path = root / STATES / shard.digest[:2] / f"{shard.digest}.safetensors"
        if not path.is_file() or path.stat().st_size != shard.bytes:
            found.absent_shards.append(shard.digest)
    found.leftovers += _staging(root, living)
    if not living:
        runs = keeper.run_ids()
        _stray(root / OBJECTS, "", lambda name: _wanted(stored, name), _maker, runs, found)
        _stray(root / STATES, ".safetensors", shards.__contains__, _extractor, runs, found)
    return found


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what goes away meanwhile is not counted."""
    if not path.is_dir() or path.is_symlink():
        return _size(path)
    return sum(_size(Path(at) / name) for at, _, names in os.walk(path) for name in names)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _object(root: Path, digest: str) -> Path:
    return root / OBJECTS / digest[:2] / digest


def _wanted(stored: Mapping[str, ArtifactRecord], name: str) -> bool:
    return name in stored and stored[name].state != "evicted"


def _staging(root: Path, living: Collection[str]) -> Iterator[Leftover]:
    folder = root / STAGING
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if owner_of(path) not in living:
            yield Leftover(path, size_of(path), "staging of a run that has ended")


def _stray(
    folder: Path,
    suffix: str,
    known: Callable[[str], bool],
    origin: Callable[[Mapping[str, Any]], object],
    runs: Collection[str],
    found: Survey,
) -> None:
    """Sort what lies in a store and the registry does not name. Each thing has a record beside it
    of the same name; one without is not whole."""
    for path in sorted(folder.glob("??/*")):
        name = path.name.removesuffix(suffix)
        if path.name.startswith("."):
            found.leftovers.append(Leftover(path, size_of(path), "half written"))
        elif path.suffix == ".json":
            whole = path.with_name(path.stem + suffix)
            if suffix and not whole.exists():
                found.leftovers.append(Leftover(path, size_of(path), "of a shard that is gone"))
        elif not known(name):
            record = _read(path.with_name(f"{name}.json"))
            if record is not None and origin(record) not in runs:
                found.unknown.append(path)
            else:
                found.leftovers.append(Leftover(path, size_of(path), "no record names it"))


def _maker(record: Mapping[str, Any]) -> object:
    made = record.get("made")
    return made.get("run") if isinstance(made, dict) else None


def _extractor(record: Mapping[str, Any]) -> object:
    return record.get("run")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
