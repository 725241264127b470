"""Training samples, straight from the state store. Imports torch and speculators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speculators.train.data import BaseDataset

from kimi_eagle.identity import digest_document
from kimi_eagle.rows.table import Rows
from kimi_eagle.stages.train.spec import Noise
from kimi_eagle.states.index import Place
from kimi_eagle.states.reader import ShardReader


@dataclass(frozen=True)
class Sample:
    """One row to train on: its number in the rows file, its key, and where its states lie."""

    row: int
    key: str
    place: Place


class StatesDataset(BaseDataset):  # type: ignore[misc]
    """Rows with their states, in speculators' form.

    A sample is `hidden_states` [tokens, aux · hidden], `verifier_last_hidden_states`
    [tokens, hidden], `input_ids` int64 [tokens], `loss_mask` bool [tokens]. A row that cannot be
    read is an error, never a sample less.
    """

    def __init__(
        self,
        rows: Rows,
        samples: Sequence[Sample],
        reader: ShardReader,
        max_tokens: int,
        *,
        noise: Noise | None = None,
        seed: int = 0,
    ):
        self._rows = rows
        self._samples = list(samples)
        self._reader = reader
        self._noise = noise
        self._seed = seed
        self.epoch_of: Any = None
        super().__init__(max_tokens, torch.bfloat16)

    def __len__(self) -> int:
        return len(self._samples)

    def _compute_approx_lengths(self) -> list[int]:
        return [sample.place.tokens for sample in self._samples]

    def _get_raw_data(self, index: int) -> dict[str, Any]:
        sample = self._samples[int(index)]
        states, ids = self._reader.read(sample.place)
        expected = torch.from_numpy(self._rows.ids(sample.row).copy())
        if not torch.equal(ids, expected):
            raise RuntimeError(
                f"row {sample.row} ({sample.key[:12]}): shard {sample.place.shard[:12]} holds "
                "other tokens than the rows file"
            )
        aux = states[:, :-1].flatten(1)
        if self._noise is not None and self._noise.std > 0:
            aux = self._noisy(aux, sample.key)
        return {
            "hidden_states": aux,
            "input_ids": ids.to(torch.int64),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.from_numpy(self._rows.mask(sample.row).copy()).bool(),
        }

    def _noisy(self, aux: Any, key: str) -> Any:
        """Noise that depends on the seed, the row and the epoch alone: not on order or workers."""
        assert self._noise is not None
        epoch = self.epoch_of.epoch if self.epoch_of is not None else 0
        seed = int(digest_document("noise/1", [self._seed, key, epoch])[:15], 16)
        generator = torch.Generator().manual_seed(seed)
        shape, std = aux.shape, self._noise.std
        if self._noise.kind == "uniform":
            drawn = (torch.rand(shape, generator=generator) * 2 - 1) * std
        else:
            drawn = torch.randn(shape, generator=generator) * std
        return (aux.float() + drawn).to(aux.dtype)
