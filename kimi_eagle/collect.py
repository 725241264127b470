"""Free disk: evict what can be made again, by policy; remove what nobody needs.

An evicted artifact is not forgotten: its record, its lineage and its digest stay, so that what was
made of it is still reused, and it is made again when something needs it. Hidden states go first,
in whole shards whose rows no kept artifact lists; then the rest, what was used longest ago first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts import journal
from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.eviction import STATES, Needs, alive, grave_of, listed_rows, take_away
from kimi_eagle.job import ANSWERS
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Keeper, Pin, Shard
from kimi_eagle.registry.store import Registry
from kimi_eagle.survey import Leftover, survey

# What people came for: never evicted unless they ask for it.
RESULTS = frozenset({"checkpoint", "evaluation", "release"})


@dataclass(frozen=True)
class Policy:
    """What may go. Conditions hold together; with none, only what nobody needs goes."""

    older_than: timedelta | None = None
    """Not used (made, reused or taken in) for this long."""
    keep_runs: int | None = None
    """Neither made nor reused by the last so many runs."""
    max_bytes: int | None = None
    """Only until the store takes no more than this."""
    results: bool = False
    """Checkpoints, evaluations and releases too, but for what is pinned and what came of it."""

    @property
    def given(self) -> bool:
        return (self.older_than, self.keep_runs, self.max_bytes) != (None, None, None)


@dataclass(frozen=True)
class Evicted:
    """An artifact that goes, and what it took to make."""

    digest: str
    kind: str
    bytes: int
    last_used: str
    seconds: float
    cpu_seconds: float | None
    gpu_seconds: float | None


@dataclass
class Collected:
    """What goes, or went."""

    done: bool = False
    evicted: list[Evicted] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)
    """Whole, and not in the registry: never touched."""
    pinned: int = 0
    held: int = 0
    """How many artifacts living runs hold."""
    store_bytes: int = 0
    """What artifacts and shards take before anything goes."""

    @property
    def bytes_freed(self) -> int:
        parts = (self.evicted, self.shards, self.leftovers)
        return sum(item.bytes for part in parts for item in part)

    @property
    def seconds(self) -> float:
        return round(sum(item.seconds for item in self.evicted), 3)

    @property
    def cpu_seconds(self) -> float:
        return round(sum(item.cpu_seconds or 0.0 for item in self.evicted), 3)

    @property
    def gpu_hours(self) -> float | None:
        """None where no making recorded it."""
        known = [item.gpu_seconds for item in self.evicted if item.gpu_seconds is not None]
        return round(sum(known) / 3600, 3) if known else None

    def document(self) -> dict[str, Any]:
        """As `gc --json` prints it."""
        return {
            "status": "done" if self.done else "dry-run",
            "bytes_freed": self.bytes_freed,
            "store_bytes": self.store_bytes,
            "make_again": {
                "seconds": self.seconds,
                "cpu_seconds": self.cpu_seconds,
                "gpu_hours": self.gpu_hours,
            },
            "evicted": [dict(vars(item)) for item in self.evicted],
            "shards": [
                {"digest": item.digest, "bytes": item.bytes, "rows": len(item.keys)}
                for item in self.shards
            ],
            "leftovers": [
                {"path": str(item.path), "bytes": item.bytes, "why": item.why}
                for item in self.leftovers
            ],
            "unknown": [str(path) for path in self.unknown],
            "pinned": self.pinned,
            "held": self.held,
        }


class Collector:
    """Collects under one root."""

    def __init__(self, root: Path, tell: Callable[[str], None]):
        """Raises: RegistryError: there is no registry, or it cannot be used."""
        self.root = root.absolute()
        self.registry = Registry(self.root, create=False)
        self._keeper = Keeper(self.registry)
        self._objects = Objects(self.root, Digests(self.registry))
        self._tell = tell

    def close(self) -> None:
        self.registry.close()

    def preview(self, policy: Policy) -> Collected:
        """What would go. Nothing is changed."""
        found = survey(self.root, self._keeper)
        collected = Collected(leftovers=found.leftovers, unknown=found.unknown)
        self._choose(policy, collected)
        return collected

    def collect(self, policy: Policy) -> Collected:
        """Evict and remove what `preview` shows; runs that live lose nothing that they hold."""
        lock = gate(self.root, shared=False)
        with grave_of(self.root, "gc") as grave:
            try:
                if not lock.acquire(wait=False):
                    self._tell("waiting for runs that look at the store just now")
                    lock.acquire(wait=True)
                collected = self.preview(policy)
                self._evict(collected, grave)
                for number, leftover in enumerate(collected.leftovers):
                    with suppress(FileNotFoundError):
                        leftover.path.rename(grave / f"{number}-{leftover.path.name}")
            finally:
                lock.release()
        collected.done = True
        return collected

    def _evict(self, collected: Collected, grave: Path) -> None:
        going, leaving = take_away(
            self._objects,
            self._keeper,
            [item.digest for item in collected.evicted],
            [item.digest for item in collected.shards],
            lambda: alive(self.root),
            grave,
        )
        collected.evicted = [item for item in collected.evicted if item.digest in going]
        collected.shards = [item for item in collected.shards if item.digest in leaving]

    def _choose(self, policy: Policy, collected: Collected) -> None:
        """Fill in what goes by policy."""
        records = [r for r in self._keeper.stored() if self._objects.path(r.digest).is_dir()]
        shards = self._keeper.shards()
        collected.store_bytes = sum(r.bytes for r in records) + sum(s.bytes for s in shards)
        pins = self._keeper.pins()
        held = self._keeper.held_by(alive(self.root))
        collected.pinned, collected.held = len(pins), len(held & {r.digest for r in records})
        if not policy.given:
            return
        used = self._keeper.last_used()
        makings = self._keeper.makings()
        before = _moment(policy.older_than)
        first_kept: str | None = None
        kept = set(pins) | held
        if policy.keep_runs:
            of_runs, first_kept = self._keeper.of_last_runs(policy.keep_runs)
            kept |= of_runs
        kept_results = self._keeper.descendants(pins) if policy.results else None

        def may_go(record: ArtifactRecord) -> bool:
            if record.digest in kept or record.digest not in makings:
                return False
            if record.kind in RESULTS and (kept_results is None or record.digest in kept_results):
                return False
            return used.get(record.digest, "") < before

        # Hidden states first: what frees whole shards.
        candidates = sorted(
            (record for record in records if may_go(record)),
            key=lambda r: (r.kind != STATES, used.get(r.digest, ""), r.digest),
        )
        needs = Needs(
            shards, {r.digest: listed_rows(self._objects, r) for r in records if r.kind == STATES}
        )
        excess = None
        if policy.max_bytes is not None:
            excess = collected.store_bytes - policy.max_bytes
        for shard in needs.unneeded():
            if excess is not None and excess <= 0:
                break
            # Rows of no artifact: of an extraction that did not come to its end, and may go on.
            if shard.created_at < min(before, first_kept or before):
                collected.shards.append(shard)
                excess = excess - shard.bytes if excess is not None else None
        if policy.older_than is not None or first_kept is not None:
            collected.leftovers += _old_answers(self.root, min(before, first_kept or before))
        for record in candidates:
            if excess is not None and excess <= 0:
                break
            freed = needs.without(record.digest)
            collected.shards += freed
            if excess is not None:
                excess -= record.bytes + sum(shard.bytes for shard in freed)
            making = makings[record.digest]
            collected.evicted.append(
                Evicted(
                    record.digest,
                    record.kind,
                    record.bytes,
                    used.get(record.digest, ""),
                    making.seconds,
                    making.resources.get("cpu_seconds"),
                    making.resources.get("gpu_seconds"),
                )
            )


def _old_answers(root: Path, before: str) -> list[Leftover]:
    """Answers of the verifier that were kept before a time. Rows have theirs in them: these are
    for those who ask the same again."""
    found = []
    for path in sorted((root / ANSWERS).glob("*/*")):
        stat = path.stat()
        kept_at = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(timespec="microseconds")
        if kept_at.replace("+00:00", "Z") < before:
            found.append(Leftover(path, stat.st_size, "answers kept for whoever asks again"))
    return found


def _moment(age: timedelta | None) -> str:
    """The time that long ago, as the registry writes it; with no age, one that is yet to come."""
    if age is None:
        return "9999"
    moment = datetime.now(UTC) - age
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def pin(root: Path, prefix: str, text: str) -> tuple[ArtifactRecord, Pin]:
    """Keep an artifact whatever a policy says; a second time replaces the note.

    Raises:
        UnknownDigest, AmbiguousDigest.
        LookupError: it is a run, or came from outside.
    """
    return _change(root, prefix, text)


def unpin(root: Path, prefix: str) -> tuple[ArtifactRecord, Pin]:
    """Let policies have an artifact again.

    Raises:
        UnknownDigest, AmbiguousDigest.
        LookupError: it is not pinned.
    """
    return _change(root, prefix, None)


def _change(root: Path, prefix: str, text: str | None) -> tuple[ArtifactRecord, Pin]:
    """Pin with a note, or unpin without one."""
    root = root.absolute()
    registry = Registry(root, create=False)
    try:
        with gate(root, shared=True):
            keeper = Keeper(registry)
            record = _pinnable(registry, keeper, prefix)
            before = keeper.pins().get(record.digest)
            if text is not None:
                at = journal.note(root, journal.PINNED, [record.digest], note=text)
                keeper.pin(record.digest, text, at)
                return record, Pin(record.digest, text, at)
            if before is None:
                raise LookupError(f"{record.kind} {record.digest[:12]} is not pinned")
            journal.note(root, journal.UNPINNED, [record.digest])
            keeper.unpin(record.digest)
            return record, before
    finally:
        registry.close()


def _pinnable(registry: Registry, keeper: Keeper, prefix: str) -> ArtifactRecord:
    digest, kind = registry.resolve(prefix)
    if kind == "run":
        raise LookupError(
            f"{prefix} is a run; pin the artifacts of it that should stay "
            f"(`kimi-eagle show {prefix}` lists them)"
        )
    (record,) = keeper.artifacts("digest = ?", digest)
    if record.state == "external":
        raise LookupError(
            f"{kind} {digest[:12]} ({record.label}) came from outside and is not in the store: "
            "nothing of it is ever evicted"
        )
    return record
