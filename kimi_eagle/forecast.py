"""How many hidden states a stage would write, and whether they fit where they are kept.

$ kimi-eagle plan manifests/kimi-k2.5.yaml
  …
states: 24,000,000 tokens in 12,034 rows that the store lacks: 1.4 TB to write; 3.0 TB are free
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kimi_eagle.ahead import Given, ahead
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.artifacts.tensors import numbers
from kimi_eagle.identity import row_key
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.pins import Pinned, Pins
from kimi_eagle.plan import REUSE, StagePlan
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

_UNSURE = "all rows: without the verifier's weights nobody can tell which the store has"


@dataclass(frozen=True)
class Forecast:
    """What a stage would write."""

    tokens: int
    bytes: int
    rows: int | None = None
    """Rows that the store lacks; None where nothing tells."""
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
        size = human_size(self.bytes)
        if self.basis:
            rows = f" in about {self.rows:,} rows" if self.rows is not None else ""
            return f"about {self.tokens:,} tokens{rows}, about {size} ({self.basis})"
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

    def all(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        stages: Sequence[StagePlan],
        given: Mapping[str, Given] | None = None,
    ) -> dict[str, Forecast]:
        """What stages that are not reused would write to the state store, as far as is known.

        Args: `given`: what stages that make rows are expected to make, where somebody says.
        """
        found = {}
        for stage in stages:
            if not makes_states(stage.kind) or stage.action == REUSE:
                continue
            rows = dict(loaded.manifest.upstream(stage.name))["rows"]
            forecast = self.of(
                loaded.manifest.stages[stage.name],
                pins.verifier.facts,
                stage.inputs["verifier"][0],
                next(iter(stage.inputs.get("rows", ())), None),
                {**pins.stages[rows], **pins.stages[stage.name]},
                loaded.manifest.stages[rows],
                (given or {}).get(rows),
                unsure=stage.name in pins.absent,
            )
            if forecast is not None:
                found[stage.name] = forecast
        return found

    def of(
        self,
        params: Any,
        facts: VerifierFacts,
        verifier: str,
        rows: str | None,
        sources: Mapping[str, Sequence[Pinned]],
        made_by: Any = None,
        given: Given | None = None,
        unsure: bool = False,
    ) -> Forecast | None:
        """What a stage that makes states would write; None where nothing is known to go by.

        Args:
            params: the stage's.
            verifier: the verifier's digest.
            rows: digest of the rows artifact, where it is known.
            sources: what it and the stage that makes the rows pin, by role.
            made_by: parameters of the stage that makes the rows.
            given: what that is expected to make, where somebody says.
            unsure: `verifier` is not the digest of all of it: no row is found by it.
        """
        contract = contract_of(params, facts)
        if rows is not None:
            path = self._objects.path(rows) / _ROWS_FILE
            try:
                found = self._counted(path, verifier, contract)
                return replace(found, basis=_UNSURE) if unsure else found
            except OSError:
                pass  # evicted, or damaged: then it is made again
        each = contract.bytes_per_token + _BYTES_OF_IDS
        if params.kind == "import_states":
            size = sum(item.record.bytes for item in sources["samples"])
            return Forecast(size // each, size, None, "the size of its samples")
        found_ahead = ahead(sources, made_by, given or Given(), self._registry)
        if found_ahead is None:
            return None
        size = found_ahead.tokens * each + (found_ahead.rows or 0) * _BYTES_OF_ROW
        return Forecast(found_ahead.tokens, size, found_ahead.rows, found_ahead.basis)

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


def makes_states(kind: str) -> bool:
    """Whether stages of a kind write to the state store."""
    return KINDS[kind].output == "states"
