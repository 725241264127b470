"""Hidden states that last only as long as a run needs them (`keep: none`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.eviction import release_states
from kimi_eagle.forecast import makes_states
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.terminal import human_size


class ShortLived:
    """Those of one run."""

    def __init__(
        self,
        root: Path,
        objects: Objects,
        registry: Ledger,
        tell: Callable[[str], None],
        manifest: Manifest,
    ):
        self._root = root
        self._objects = objects
        self._registry = registry
        self._tell = tell
        self._takers = {name: takers for name, takers in taken(manifest).items() if takers}

    def release(self, settled: Mapping[str, ExecutionRecord], run_id: str) -> None:
        """Evict those whose every taker is done, once each."""
        done = [name for name, takers in self._takers.items() if {name, *takers} <= settled.keys()]
        for name in done:
            del self._takers[name]
            (digest,) = settled[name].outputs.values()
            keeper = Keeper(self._registry)
            found = release_states(self._root, self._objects, keeper, digest, run_id)
            if found.why_not:
                if self._objects.path(digest).is_dir():
                    self._tell(f"{name}: its hidden states are kept: {found.why_not}")
                continue
            self._tell(
                f"{name}: its hidden states were evicted (keep: none): {human_size(found.bytes)} "
                "freed; they are made again when something needs them"
            )


def taken(manifest: Manifest) -> dict[str, list[str]]:
    """Stages whose hidden states are not to be kept, and what takes these."""
    return {
        name: [
            taker
            for taker in manifest.stages
            if name in {source for _, source in manifest.upstream(taker)}
        ]
        for name, params in manifest.stages.items()
        if makes_states(params.kind) and getattr(params, "keep", None) == "none"
    }
