"""How many hidden states a stage would write, and whether they fit where they are kept.

$ kimi-eagle plan manifests/kimi-k2.5.yaml
  …
states: 24,000,000 tokens in 12,034 rows that the store lacks: 1.4 TB to write; 3.0 TB are free
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.artifacts.tensors import numbers
from kimi_eagle.identity import row_key
from kimi_eagle.pins import Pinned
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.states.contract import LayerContract, contract_of
from kimi_eagle.terminal import human_size
from kimi_eagle.verifiers.facts import VerifierFacts

# As `rows.table` names it, which takes numpy to import.
_ROWS_FILE = "rows.safetensors"

# Beside its states a row takes an id a token, an offset, and its line in the list of its shard.
_BYTES_OF_IDS = 4
_BYTES_OF_ROW = 8 + 180

# English chats as JSON lines; where an earlier `prepare` is on record, its own rate counts.
_SOURCE_BYTES_OF_TOKEN = 4.0
_COMPRESSED = (".gz", ".xz")
_COMPRESSION = 4


@dataclass(frozen=True)
class Forecast:
    """What a stage would write."""

    tokens: int
    bytes: int
    rows: int | None = None
    """Rows that the store lacks; None where nobody knows yet."""
    basis: str = ""
    """What an estimate goes by; empty where rows and tokens were counted."""

    def document(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "estimate": bool(self.basis),
            "basis": self.basis,
        }

    def says(self) -> str:
        if self.rows is None:
            return f"about {self.tokens:,} tokens, about {human_size(self.bytes)} ({self.basis})"
        size = human_size(self.bytes)
        return f"{self.tokens:,} tokens in {self.rows:,} rows that the store lacks: {size}"


class Forecaster:
    """Forecasts for one store of hidden states."""

    def __init__(self, root: Path, registry: Ledger, objects: Objects):
        """Args: `root` and `registry` of the states; `objects`: where rows are."""
        self._root = root
        self._registry = registry
        self._objects = objects
        # A run asks when it begins, and again when the stage does.
        self._keys = lru_cache(maxsize=2)(self._read_keys)

    def of(
        self,
        params: Any,
        facts: VerifierFacts,
        verifier: str,
        rows: str | None,
        sources: Mapping[str, Sequence[Pinned]],
    ) -> Forecast | None:
        """What a stage that makes states would write; None where nothing is known to go by.

        Args:
            params: the stage's.
            verifier: the verifier's digest.
            rows: digest of the rows artifact, where it is known.
            sources: what it and the stage that makes the rows pin, by role.
        """
        contract = contract_of(params, facts)
        if rows is not None:
            path = self._objects.path(rows) / _ROWS_FILE
            try:
                return self._counted(path, verifier, contract)
            except OSError:
                pass  # evicted, or damaged: then it is made again
        each = contract.bytes_per_token + _BYTES_OF_IDS
        if params.kind == "import_states":
            size = sum(item.record.bytes for item in sources["samples"])
            return Forecast(size // each, size, None, "the size of its samples")
        tokens, basis = self._estimated(sources)
        if tokens is None:
            return None
        return Forecast(tokens, tokens * each, None, basis)

    def trouble(self, forecast: Forecast, quota: int | None) -> str | None:
        """Why states do not fit, with figures and what to do; None where they do."""
        held, free = self.held(), self.free()
        what_to_do = (
            "; free some with `kimi-eagle gc`, let a run keep states only as long as it needs them "
            "(`keep: none`), or submit under another root (--root)"
        )
        if forecast.bytes > free:
            return (
                f"its hidden states do not fit: {forecast.says()}, and {human_size(free)} are "
                f"free where {self._root} lies{what_to_do}"
            )
        if quota is not None and held + forecast.bytes > quota:
            return (
                f"its hidden states would pass the quota: {forecast.says()}; the store holds "
                f"{human_size(held)} already, and `store.quota` allows {human_size(quota)}; raise "
                f"it, or{what_to_do[1:]}"
            )
        return None

    def held(self) -> int:
        """Bytes that shards take."""
        return sum(size for _, size in self._registry.shards())

    def free(self) -> int:
        """Bytes that are free on the file system that shards are written to."""
        folder = self._root / "states"
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _counted(self, path: Path, verifier: str, contract: LayerContract) -> Forecast:
        """Raises: OSError: the rows cannot be read."""
        lengths = self._keys(path, verifier, contract)
        lacking = self._registry.missing_rows(list(lengths))
        tokens = sum(lengths[key] for key in lacking)
        size = tokens * (contract.bytes_per_token + _BYTES_OF_IDS) + len(lacking) * _BYTES_OF_ROW
        return Forecast(tokens, size, len(lacking))

    def _read_keys(self, path: Path, verifier: str, contract: LayerContract) -> dict[str, int]:
        """Tokens of each row, by row key."""
        ids = memoryview(numbers(path, "token_ids", "I32")).cast("B")
        offsets = numbers(path, "offsets", "I64")
        document = contract.document()
        return {
            row_key(verifier, document, bytes(ids[start * 4 : end * 4])): end - start
            for start, end in pairwise(offsets)
        }

    def _estimated(self, sources: Mapping[str, Sequence[Pinned]]) -> tuple[int | None, str]:
        """Tokens of rows that are not made yet, and what that goes by."""
        records = [
            item.record for role, items in sources.items() if _is_data(role) for item in items
        ]
        if not records:
            return None, ""
        size = _unpacked((record.label, record.bytes) for record in records)
        rate, whose = _SOURCE_BYTES_OF_TOKEN, "at 4 bytes a token"
        before = self._registry.latest_of("prepare", "")
        measured = self._rate(before) if before is not None else None
        if before is not None and measured is not None:
            rate, whose = measured, f"at {measured:.1f} bytes a token, as in run {before.run_id}"
        return (
            round(size / rate),
            f"an estimate from {human_size(size)} of sources {whose}; the rows are not made yet",
        )

    def _rate(self, made: ExecutionRecord) -> float | None:
        """Bytes of its sources for each token that an execution made."""
        tokens = made.metrics.get("tokens")
        if not tokens or made.document is None:
            return None
        files = [
            self._registry.artifact(digest)
            for role, digests in made.document["inputs"].items()
            if _is_data(role)
            for digest in digests
        ]
        size = _unpacked((file.label, file.bytes) for file in files if file is not None)
        return size / tokens if size else None


def makes_states(kind: str) -> bool:
    """Whether stages of a kind write to the state store."""
    return KINDS[kind].output == "states"


def _is_data(role: str) -> bool:
    return role.split(".")[0] == "sources"


def _unpacked(files: Iterable[tuple[str, int]]) -> int:
    """Bytes of source files, those that are compressed at what they are likely to hold."""
    return sum(size * (_COMPRESSION if label.endswith(_COMPRESSED) else 1) for label, size in files)
