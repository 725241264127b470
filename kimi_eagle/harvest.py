"""Shards of hidden states that workers finished: into the store, and findable."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import sync_folder, write_json
from kimi_eagle.clock import now
from kimi_eagle.records import ShardRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.states.layout import shard_path
from kimi_eagle.states.spool import close_what_was_left


@dataclass(frozen=True)
class StateStore:
    """Where hidden states are kept: shards under `root`, found through `registry`."""

    root: Path
    registry: Ledger


def take_shard(store: StateStore, digests: Digests, staged: Path) -> None:
    """Publish a shard that a worker finished: rename first, then make its rows findable."""
    digest, size = digests.of(staged)
    listed = json.loads(staged.with_suffix(".json").read_text("utf-8"))
    target = shard_path(store.root, digest)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.chmod(0o444)
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    created_at = now()
    if digest not in dict(store.registry.shards()):
        # What came from elsewhere says which run made it.
        run = listed.get("run", staged.parent.parent.name.split("-")[0])
        write_json(target.with_suffix(".json"), {**listed, "run": run, "created_at": created_at})
    staged.rename(target)
    sync_folder(target.parent)
    store.registry.add_shard(
        ShardRecord(digest, size, tuple((r[0], r[1], r[2], r[3]) for r in listed["rows"])),
        created_at,
    )
    digests.remember(target, digest)


def take_left(store: StateStore, digests: Digests, folder: Path) -> int:
    """Publish what a worker that was ended left whole in its folder of shards; returns how many.

    Rows that were written are never run again, however the worker came to its end.
    """
    names = close_what_was_left(folder)
    for name in names:
        take_shard(store, digests, folder / name)
    return len(names)
