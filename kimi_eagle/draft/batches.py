"""Batches of hidden states, read by row key and packed. Imports torch.

Position i of a row pairs token i+1 with the aux states of token i, and with the last state and the
mask of token i+1 (as EAGLE-3 is served: the draft is given the token that was just chosen, and the
states from which it was). So a row of n tokens takes n - 1 positions, and mask and targets are
shifted with the inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kimi_eagle.draft.packing import Batch, Item
from kimi_eagle.identity import digest_document
from kimi_eagle.rows.table import Rows
from kimi_eagle.stages.train.spec import Noise
from kimi_eagle.states.index import Place
from kimi_eagle.states.reader import ShardReader

# On a CPU a batch is padded to a multiple of this; on a GPU to its full size, for which alone
# kernels are compiled.
_CPU_PADDING = 64


@dataclass(frozen=True)
class Source:
    """One row to train on: its number in the rows file, its key, and where its states lie."""

    row: int
    key: str
    place: Place


@dataclass(frozen=True)
class PackedBatch:
    """Rows one after the other, and padding; everything on one device."""

    hidden_states: Any
    """bf16 [positions, aux · hidden]."""
    last_states: Any
    """bf16 [positions, hidden]: the verifier's last layer, before its norm."""
    input_ids: Any
    """int64 [positions]."""
    position_ids: Any
    """int64 [positions], from 1 in each row."""
    document_ids: Any
    """int64 [positions]: which row, from 0; -1 for padding."""
    starts: tuple[Any, ...]
    """For each TTT step k, int64: the positions t whose target, k further on, has a loss and is
    of the same row."""
    loss_mask: Any
    """bool [positions]: whether the token of a position is supervised."""
    rank: Any
    """int64 [positions]: a supervised position's number among those."""
    lengths: tuple[int, ...]
    """Positions of each row."""

    @property
    def tokens(self) -> int:
        """Positions that are no padding."""
        return sum(self.lengths)

    def to(self, device: Any) -> PackedBatch:
        """A copy on a device; from pinned memory it does not wait."""
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
            elif field.name == "starts":
                moved[field.name] = tuple(item.to(device, non_blocking=True) for item in value)
        return replace(self, **moved)

    def pinned(self) -> PackedBatch:
        found = {
            field.name: getattr(self, field.name).pin_memory()
            for field in fields(self)
            if isinstance(getattr(self, field.name), torch.Tensor)
        }
        return replace(self, starts=tuple(item.pin_memory() for item in self.starts), **found)

    def tensors(self) -> list[Any]:
        found = [getattr(self, field.name) for field in fields(self)]
        return [value for value in found if isinstance(value, torch.Tensor)] + list(self.starts)


def starts_of(mask: Any, ttt_step: int) -> Any:
    """int64: the positions of one row whose target is supervised, `ttt_step` positions further on.

    Args: `mask`: bool [positions] of one row, shifted with its inputs.
    """
    return mask[ttt_step:].nonzero().flatten()


def item_of(source: Source, mask: Any, ttt_steps: int, size: int) -> Item:
    """A row as packing sees it: cut to `size` positions.

    Args: `mask`: uint8 or bool [tokens] of the row as it was prepared.
    """
    shifted = torch.from_numpy(mask[1 : size + 1].copy()).bool()
    supervised = tuple(int(shifted[k:].sum()) for k in range(ttt_steps))
    return Item(source.key, len(shifted), supervised)


class Loader:
    """Reads batches out of the state store."""

    def __init__(
        self,
        rows: Rows,
        sources: Sequence[Source],
        reader: ShardReader,
        *,
        size: int,
        ttt_steps: int,
        seed: int,
        noise: Noise | None = None,
        pin: bool = False,
    ):
        """Args: `size`: positions in a batch; `pin`: for a GPU, padded whole and page-locked."""
        self._rows = rows
        self._sources = list(sources)
        self._reader = reader
        self._size = size
        self._ttt_steps = ttt_steps
        self._seed = seed
        self._noise = noise if noise is not None and noise.std > 0 else None
        self._pin = pin

    @property
    def size(self) -> int:
        """Positions in a batch."""
        return self._size

    def load(self, batch: Batch, epoch: int) -> PackedBatch:
        """Read one batch; what an item cannot give is an error, never a sample less.

        Raises:
            RuntimeError: a row is not what the rows file says, or the batch has no supervision.
        """
        parts = [self._row(number, epoch) for number in batch]
        lengths = [len(ids) for _, _, ids, _ in parts]
        tokens = sum(lengths)
        width = self._size if self._pin else -(-tokens // _CPU_PADDING) * _CPU_PADDING
        aux, last = parts[0][0], parts[0][1]
        hidden_states = torch.zeros(width, aux.shape[1], dtype=aux.dtype)
        last_states = torch.zeros(width, last.shape[1], dtype=last.dtype)
        input_ids = torch.zeros(width, dtype=torch.int64)
        position_ids = torch.zeros(width, dtype=torch.int64)
        document_ids = torch.full((width,), -1, dtype=torch.int64)
        loss_mask = torch.zeros(width, dtype=torch.bool)
        starts: list[list[Any]] = [[] for _ in range(self._ttt_steps)]
        first = 0
        for number, (aux, last, ids, mask) in enumerate(parts):
            window = slice(first, first + len(ids))
            hidden_states[window], last_states[window] = aux, last
            input_ids[window], loss_mask[window] = ids, mask
            position_ids[window] = torch.arange(1, len(ids) + 1)
            document_ids[window] = number
            for k in range(self._ttt_steps):
                starts[k].append(starts_of(mask, k) + first)
            first += len(ids)
        found = PackedBatch(
            hidden_states,
            last_states,
            input_ids,
            position_ids,
            document_ids,
            tuple(torch.cat(items) for items in starts),
            loss_mask,
            torch.cumsum(loss_mask, 0) - 1,
            tuple(lengths),
        )
        if not len(found.starts[0]):
            keys = ", ".join(self._sources[number].key[:12] for number in batch)
            raise RuntimeError(f"a batch has no supervised position at all: rows {keys}")
        return found.pinned() if self._pin else found

    def _row(self, number: int, epoch: int) -> tuple[Any, Any, Any, Any]:
        """(aux states, last states, ids, mask) of the positions of one row."""
        source = self._sources[number]
        states, ids = self._reader.read(source.place)
        expected = torch.from_numpy(self._rows.ids(source.row).copy())
        if not torch.equal(ids, expected):
            raise RuntimeError(
                f"row {source.row} ({source.key[:12]}): shard {source.place.shard[:12]} holds "
                "other tokens than the rows file"
            )
        mask = torch.from_numpy(self._rows.mask(source.row).copy()).bool()
        end = min(len(ids), self._size + 1)
        aux = states[: end - 1, :-1].flatten(1)
        if self._noise is not None:
            aux = self._noisy(aux, source.key, epoch)
        return aux, states[1:end, -1], ids[1:end].to(torch.int64), mask[1:end]

    def _noisy(self, aux: Any, key: str, epoch: int) -> Any:
        """Noise that depends on the seed, the row and the epoch alone: not on order or threads."""
        assert self._noise is not None
        seed = int(digest_document("noise/1", [self._seed, key, epoch])[:15], 16)
        generator = torch.Generator().manual_seed(seed)
        shape, std = aux.shape, self._noise.std
        if self._noise.kind == "uniform":
            drawn = torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(std)
        else:
            drawn = torch.randn(shape, generator=generator).mul_(std)
        return drawn.add_(aux).to(aux.dtype)


Wanted = tuple[Batch, int]
"""A batch and its epoch."""


@contextmanager
def ahead(loader: Any, wanted: Sequence[Wanted], workers: int) -> Iterator[Iterator[PackedBatch]]:
    """The batches in order, read by so many threads ahead of their use; none: when asked for.

    Leaving the context stops the threads.
    """
    if workers == 0:
        yield (loader.load(batch, epoch) for batch, epoch in wanted)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="loader")
    try:
        yield _ahead(pool, loader, wanted, workers + 1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ahead(
    pool: ThreadPoolExecutor, loader: Any, wanted: Sequence[Wanted], depth: int
) -> Iterator[PackedBatch]:
    waiting: deque[Future[PackedBatch]] = deque()
    coming = iter(wanted)
    for batch, epoch in coming:
        waiting.append(pool.submit(loader.load, batch, epoch))
        if len(waiting) == depth:
            break
    while waiting:
        found = waiting.popleft().result()
        following = next(coming, None)
        if following is not None:
            waiting.append(pool.submit(loader.load, following[0], following[1]))
        yield found


def on_device(batches: Iterator[PackedBatch], device: Any) -> Iterator[PackedBatch]:
    """The batches on a device; on a GPU the next is copied while the present one is worked on."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    coming: PackedBatch | None = None
    ready: Any = None
    for batch in batches:
        present, arrived = coming, ready
        with torch.cuda.stream(stream):
            coming = batch.to(device)
            ready = stream.record_event()
        if present is not None:
            yield _arrived(present, arrived)
    if coming is not None:
        yield _arrived(coming, ready)


def _arrived(batch: PackedBatch, event: Any) -> PackedBatch:
    current = torch.cuda.current_stream()
    current.wait_event(event)
    for tensor in batch.tensors():
        tensor.record_stream(current)
    return batch
