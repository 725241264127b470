"""Take artifacts and shards of hidden states out of the store; what is known of them stays.

`gc` does it by policy, and a run with `keep: none` as soon as it is done with its hidden states.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kimi_eagle.artifacts import journal
from kimi_eagle.artifacts.files import write_json
from kimi_eagle.artifacts.locks import gate, held
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Keeper, Shard
from kimi_eagle.states.layout import ROWS, shard_path, stored_digests

STATES = "states"

# A run holds the lock on this file in its folder as long as it lives.
ALIVE = ".alive"

# What is being evicted, in the folder that its files go to: should the process be killed between
# the record of it and the last file, the next run ends what it began (see `finish_evictions`).
GOING = "going.json"
GRAVE = "discarded-"


def alive(root: Path) -> set[str]:
    """The ids of runs with a living process."""
    return {path.parent.name for path in root.glob(f"*/{ALIVE}") if held(path)}


def owner_of(staged: Path) -> str:
    """The id of the run that a folder in staging is of; of what other processes stage, no run's."""
    return staged.name.removeprefix(GRAVE).split("-")[0]


@contextmanager
def grave_of(root: Path, owner: str) -> Iterator[Path]:
    """Where what is taken out of the store goes (`take_away`), to be deleted at leisure: nothing
    finds it any more."""
    grave = root / STAGING / f"{GRAVE}{owner}-{secrets.token_hex(4)}"
    try:
        yield grave
    finally:
        shutil.rmtree(grave, ignore_errors=True)


class Needs:
    """Which shards which states artifacts need, as artifacts go."""

    def __init__(self, shards: Sequence[Shard], listed: dict[str, set[str]]):
        """Args: `listed`: the rows of each states artifact, by its digest."""
        self._shards = {shard.digest: shard for shard in shards}
        place = {key: shard.digest for shard in shards for key in shard.keys}
        self._of: dict[str, set[str]] = {
            digest: {place[key] for key in keys if key in place} for digest, keys in listed.items()
        }
        self._takers: dict[str, set[str]] = {digest: set() for digest in self._shards}
        for digest, needed in self._of.items():
            for shard in needed:
                self._takers[shard].add(digest)

    def unneeded(self) -> list[Shard]:
        """Shards that no artifact needs, oldest first."""
        return [self._shards[digest] for digest, takers in self._takers.items() if not takers]

    def without(self, artifact: str) -> list[Shard]:
        """Take an artifact out; returns the shards that nothing needs from then on."""
        freed = []
        for shard in sorted(self._of.pop(artifact, ())):
            self._takers[shard].discard(artifact)
            if not self._takers[shard]:
                freed.append(self._shards[shard])
        return freed


@dataclass(frozen=True)
class Released:
    """What the eviction of hidden states came to."""

    bytes: int
    """Freed."""
    why_not: str = ""
    """Why nothing was evicted; empty when it was."""


def release_states(root: Path, objects: Objects, keeper: Keeper, digest: str, run: str) -> Released:
    """Evict a states artifact that a run is done with, and the shards that nothing else needs.

    Nothing that is pinned goes, and nothing that another living run holds.
    """
    others = partial(_others_alive, root, run)
    with grave_of(root, run) as grave, gate(root, shared=False):
        if digest in keeper.pins():
            return Released(0, "it is pinned")
        # None can come to hold it while the gate is closed.
        if digest in keeper.held_by(others()):
            return Released(0, "another run works with it")
        stored = {record.digest: record for record in keeper.stored()}
        listed = {
            record.digest: listed_rows(objects, record)
            for record in stored.values()
            if record.kind == STATES and objects.path(record.digest).is_dir()
        }
        if digest not in listed:
            return Released(0, "it is gone already")
        shards = Needs(keeper.shards(), listed).without(digest)
        going, leaving = take_away(
            objects, keeper, [digest], [shard.digest for shard in shards], others, grave
        )
    if not going:
        return Released(0, "another run works with it")
    freed = sum(shard.bytes for shard in shards if shard.digest in leaving)
    return Released(freed + stored[digest].bytes)


def _others_alive(root: Path, run: str) -> set[str]:
    return alive(root) - {run}


def listed_rows(objects: Objects, record: ArtifactRecord) -> set[str]:
    """The rows that a states artifact has states of; none where its list is damaged."""
    try:
        text = (objects.path(record.digest) / ROWS).read_text("utf-8")
        return set(stored_digests(text))
    except (OSError, ValueError):
        return set()


def take_away(
    objects: Objects,
    keeper: Keeper,
    artifacts: Sequence[str],
    shards: Sequence[str],
    living: Callable[[], Collection[str]],
    grave: Path,
) -> tuple[set[str], set[str]]:
    """Evict; returns the artifacts and the shards that went, which is less than was asked for
    where runs that live hold them. The caller holds the gate.

    Args: `living`: the runs that do; `grave`: where the files go (`grave_of`).
    """

    def note(digests: Sequence[str]) -> None:
        if digests:
            journal.note(objects.root, journal.EVICTED, digests)

    grave.mkdir(parents=True)
    write_json(grave / GOING, {"artifacts": sorted(artifacts), "shards": sorted(shards)})
    going, leaving = keeper.evict(artifacts, shards, living, note)
    _bury(objects, going, leaving, grave)
    return going, leaving


def finish_evictions(objects: Objects, keeper: Keeper) -> None:
    """End what processes that were killed had begun to evict. Nothing is done while others are at
    work: one of them may be just about to record the same, made again."""
    begun = sorted((objects.root / STAGING).glob(f"{GRAVE}*/{GOING}"))
    if not begun:
        return
    lock = gate(objects.root, shared=False)
    try:
        if not lock.acquire(wait=False) or alive(objects.root):
            return
        evicted = {record.digest for record in keeper.artifacts("state = 'evicted'")}
        looked_for = {shard.digest for shard in keeper.shards()}
        for path in begun:
            with suppress(OSError, ValueError):
                going = json.loads(path.read_text("utf-8"))
                leaving = set(going["shards"]) - looked_for
                _bury(objects, evicted & set(going["artifacts"]), leaving, path.parent)
            shutil.rmtree(path.parent, ignore_errors=True)
    finally:
        lock.release()


def _bury(
    objects: Objects, artifacts: Collection[str], shards: Collection[str], grave: Path
) -> None:
    """Move the files of what was evicted to where they can be deleted at leisure."""
    for digest in artifacts:
        with suppress(FileNotFoundError):
            objects.path(digest).rename(grave / digest)
    for digest in shards:
        path = shard_path(objects.root, digest)
        for file in (path, path.with_suffix(".json")):
            with suppress(FileNotFoundError):
                file.rename(grave / file.name)
