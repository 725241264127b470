"""What several views look up: a run or an artifact by its hash, which runs are lost."""

from __future__ import annotations

from datetime import UTC, datetime

from kimi_eagle.coordinator import LOST, as_it_is
from kimi_eagle.records import ArtifactRecord, RunRecord
from kimi_eagle.registry.search import RUN, Search
from kimi_eagle.ui.view import Asked, Moved, NotThere


def run_at(asked: Asked, prefix: str, rest: str = "") -> RunRecord | Moved:
    """The run as it is, or where its page is when `prefix` is not its whole id.

    Raises: UnknownDigest, AmbiguousDigest.
    """
    run = asked.registry.run(prefix)
    if run is None:
        return Moved(f"/runs/{Search(asked.registry).run(prefix).id}{rest}")
    return as_it_is(asked.root, run, asked.registry.run)


def artifact_at(asked: Asked, prefix: str, rest: str = "") -> ArtifactRecord | Moved:
    """The artifact, or where its page is when `prefix` is not its whole digest.

    Raises: UnknownDigest, AmbiguousDigest; NotThere for a hash of something else.
    """
    found = asked.registry.artifact(prefix)
    if found is not None:
        return found
    digest, kind = Search(asked.registry).find(prefix, what="artifact")
    if kind == RUN:
        return Moved(f"/runs/{digest}")
    if asked.registry.artifact(digest) is None:
        raise NotThere(f"{digest} is no artifact but a {kind}; `kimi-eagle show {prefix}` tells")
    return Moved(f"/artifacts/{digest}{rest}")


def lost_runs(asked: Asked) -> frozenset[str]:
    """The ids of runs that have no end and no coordinator."""
    found = set()
    for run_id in asked.registry.running_runs():
        run = asked.registry.run(run_id)
        if run is not None and as_it_is(asked.root, run, asked.registry.run).status == LOST:
            found.add(run_id)
    return frozenset(found)


def seconds_of(run: RunRecord) -> float | None:
    """How long a run took, or has taken so far; None for one that is lost."""
    if run.status == LOST:
        return None
    started = datetime.fromisoformat(run.started_at)
    ended = datetime.fromisoformat(run.ended_at) if run.ended_at else datetime.now(UTC)
    return round((ended - started).total_seconds(), 1)
