"""What planning asks about the past, from the registry and the disk."""

from __future__ import annotations

from pathlib import Path

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.manifest.names import BETWEEN
from kimi_eagle.records import ArtifactRecord, ExecutionRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.states.layout import ROWS, shard_path, stored_digests


class History:
    """The registry for what was made, the disk for whether it is still there, as it was."""

    def __init__(self, registry: Ledger, objects: Objects, root: Path, digests: Digests):
        self._registry = registry
        self._objects = objects
        self._root = root
        self._digests = digests
        self._keeper = Keeper(registry)
        self._shards_checked = False

    def made_by_key(self, key: str) -> ExecutionRecord | None:
        return self._registry.made_by_key(key)

    def latest_of(self, kind: str, stage: str) -> ExecutionRecord | None:
        """What was last made as this stage, or else as the stage that it is a variant of."""
        found = self._registry.latest_of(kind, stage)
        if found is None and BETWEEN in stage:
            found = self._registry.latest_of(kind, stage.partition(BETWEEN)[0])
        return found

    def trouble(self, execution: ExecutionRecord) -> str | None:
        for digest in execution.outputs.values():
            record = self._registry.artifact(digest)
            if record is None:
                return f"output {digest[:12]} is not in the registry"
            found = self.artifact_trouble(record)
            if found is not None:
                return found
        return None

    def artifact_trouble(self, record: ArtifactRecord) -> str | None:
        """Why an artifact cannot be used as it is on disk, the rows of states included."""
        found = self._objects.trouble(record)
        if found is None and record.kind == "states":
            found = self._states_trouble(record)
        named = f"{record.kind} {record.digest[:12]}"
        if record.state == "evicted" and found is not None:
            return f"{named} was evicted (by `kimi-eagle gc`, or as `keep: none` has it)"
        if record.state == "missing" and found is None:
            return (
                f"{named} was found damaged by `kimi-eagle verify` (if it was mended since, "
                "verify it again)"
            )
        return found

    def _states_trouble(self, record: ArtifactRecord) -> str | None:
        self.check_shards()
        text = (self._objects.path(record.digest) / ROWS).read_text("utf-8")
        rows = stored_digests(text)
        held = self._keeper.rows(list(rows))
        missing = sum(key not in held for key in rows)
        if missing:
            return f"states {record.digest[:12]}: {missing} of {len(rows)} rows are not stored"
        # A row that was extracted again may have come out otherwise.
        other = sum(held[key][0] != digest for key, digest in rows.items())
        if other:
            return (
                f"states {record.digest[:12]}: {other} of {len(rows)} rows are stored as other "
                "bytes than they were"
            )
        return None

    def check_shards(self) -> list[str]:
        """Drop the rows of shards that are gone or altered; says which. Once a run."""
        if self._shards_checked:
            return []
        self._shards_checked = True
        lost = []
        for digest, _ in self._registry.shards():
            path = shard_path(self._root, digest)
            try:
                found, _ = self._digests.of(path)
            except OSError:
                found = "nothing"
            if found != digest:
                lost.append(digest)
                self._registry.drop_shard(digest)
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
        return lost
