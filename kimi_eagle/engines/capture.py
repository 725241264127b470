"""Hidden states of forward passes, put together by row and handed to the writers.

A pass gives the outputs of some layers for the tokens of several requests, one after the other; a
long row can come in several passes. Whole rows go to a ring of memory that is shared with writer
processes (`engines.states_writer`). On a GPU nothing here waits for it: the copy runs on a stream
of its own, to pinned memory. When the ring is full, the engine waits: a slow disk slows it, and
memory stays bounded. Imports torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kimi_eagle.engines.pinned import tensor_over
from kimi_eagle.engines.ring import Ring, aligned
from kimi_eagle.engines.todo import Todo
from kimi_eagle.engines.writer_process import Writers
from kimi_eagle.states.contract import LayerContract

# Rows of one message to a writer: it must fit into a socket's buffer.
_GROUP = 256
# So that all writers have some of a pass, the last of a run too.
_GROUP_BYTES = 16 << 20
# Groups that the ring has room for: while some are written by a writer each, others are copied.
_GROUPS = 16
_LOOK_SECONDS = 0.0005


@dataclass(frozen=True)
class Batch:
    """What a forward pass runs."""

    requests: Sequence[str]
    """Their names, in the order of their tokens: a row's number, and what the engine adds to it."""
    starts: Sequence[int]
    """[requests + 1]: where the tokens of each begin."""
    done: Sequence[int]
    """[requests]: tokens of each that earlier passes ran."""
    token_ids: Any
    """int32 [tokens]."""


@dataclass
class _Piece:
    """Tokens of a row, or of several rows, that lie together."""

    states: Any
    """[tokens, layers, hidden]."""
    token_ids: Any
    """[tokens]."""


@dataclass
class _Group:
    """Rows that are copied together."""

    rows: list[tuple[str, str, str, int, int, int]]
    """As `Writers.hand_over` takes them."""
    held: tuple[_Piece, ...]
    """What must live until the copy is done."""
    event: Any = None


@dataclass
class _Whole:
    row: int
    pieces: list[_Piece]


class Capture:
    def __init__(self, settings: Mapping[str, Any], device: Any):
        """Args:
        settings: `rows` as `Todo.write` writes them, `contract`, `spool`, `shard_bytes` and
            `ring_bytes`.
        device: where the engine runs.

        Raises: RuntimeError: the ring cannot be pinned.
        """
        self._todo = Todo(settings["rows"])
        self._contract = LayerContract.of(settings["contract"])
        self._token_bytes = self._contract.engine_bytes_per_token
        self._folder = ""
        self._begun: dict[int, list[_Piece]] = {}
        self._copying: deque[Future[None]] = deque()
        self._hander = ThreadPoolExecutor(1, thread_name_prefix="hands-states-over")
        self._ring = Ring(settings["ring_bytes"])
        self._writers = Writers(
            settings["spool"], self._contract, settings["shard_bytes"], self._ring.size
        )
        cuda = device.type == "cuda"
        self._memory = tensor_over(self._writers.memory, pinned=cuda)
        self._stream = torch.cuda.Stream(device) if cuda else None

    def into(self, folder: str) -> None:
        """Rows go to a folder of the spool from now on."""
        self._folder = folder

    def take(self, states: Any, batch: Batch) -> None:
        """Args: `states`: bfloat16 [tokens, layers, hidden], of the contract's layers.

        Raises: RuntimeError: the ring will never have room for a row, or a writer has ended.
        """
        # Read by the caller's stream, and its memory is the engine's own, used again next time.
        token_ids = batch.token_ids[: len(states)].clone()
        for group in self._groups(self._whole(states, token_ids, batch)):
            self._copy(group)
        self._look()

    def flush(self) -> None:
        """Hand over what has been taken."""
        while self._copying:
            self._copying.popleft().result()

    def end(self) -> None:
        self._hander.shutdown()
        self._writers.end()

    def _whole(self, states: Any, token_ids: Any, batch: Batch) -> Iterator[_Whole]:
        """Rows that end in this pass; what others have of it is kept."""
        spans = pairwise(batch.starts)
        for name, (first, after), done in zip(batch.requests, spans, batch.done, strict=True):
            row, _, _ = name.partition("-")
            if not row.isdecimal():
                continue  # vLLM's own, for warming up
            number = int(row)
            length = self._todo.tokens(number)
            after = min(after, first + length - done)
            if after <= first:
                continue  # it has its prompt
            piece = _Piece(states[first:after], token_ids[first:after])
            # One that was put off (preempted) begins anew.
            earlier = self._begun.pop(number, []) if done else []
            if done + after - first < length:
                # Its own memory, since that of the pass is much more.
                kept = _Piece(piece.states.clone(), piece.token_ids.clone())
                self._begun[number] = [*earlier, kept]
                continue
            if sum(len(one.token_ids) for one in earlier) != done:
                raise RuntimeError(f"{done} tokens of row {number} were not seen")
            yield _Whole(number, [*earlier, piece])

    def _groups(self, rows: Iterable[_Whole]) -> Iterator[list[_Whole]]:
        group: list[_Whole] = []
        tokens = 0
        most = min(_GROUP_BYTES, self._ring.size // _GROUPS)
        for row in rows:
            more = self._todo.tokens(row.row)
            much = self._size(tokens + more) > most
            if group and (len(group) == _GROUP or much):
                yield group
                group, tokens = [], 0
            group.append(row)
            tokens += more
        if group:
            yield group

    def _copy(self, group: list[_Whole]) -> None:
        tokens = sum(self._todo.tokens(one.row) for one in group)
        at = self._room(tokens)
        ids_at = at + aligned(self._token_bytes * tokens)
        targets = (
            self._memory[at : at + self._token_bytes * tokens]
            .view(torch.bfloat16)
            .view(tokens, len(self._contract.layers), self._contract.hidden_size),
            self._memory[ids_at : ids_at + 4 * tokens].view(torch.int32),
        )
        rows = []
        for one in group:
            length = self._todo.tokens(one.row)
            key, digest = self._todo.keys[one.row], self._todo.ids_digest(one.row)
            rows.append((key, self._folder, digest, length, at, ids_at))
            at, ids_at = at + self._token_bytes * length, ids_at + 4 * length
        pieces = tuple(_joined(piece for one in group for piece in one.pieces))
        copied = _Group(rows, pieces)
        if self._stream is None:
            _lay_out(pieces, *targets)
        else:
            ready = torch.cuda.Event()
            ready.record()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                _lay_out(pieces, *targets)
                copied.event = torch.cuda.Event(blocking=True)  # its thread sleeps till then
                copied.event.record(self._stream)
        self._copying.append(self._hander.submit(self._hand_over, copied))

    def _hand_over(self, group: _Group) -> None:
        """By a thread of its own."""
        if group.event is not None:
            group.event.synchronize()
        self._writers.hand_over(group.rows)

    def _room(self, tokens: int) -> int:
        """Where the ring has room for a group; waits for it."""
        size = self._size(tokens)
        if size > self._ring.size:
            raise RuntimeError(
                f"a row of {tokens} tokens takes {size} bytes, the ring has {self._ring.size}: "
                "raise engine.buffer_mib"
            )
        while (at := self._ring.take(size)) is None:
            self._look()
            time.sleep(_LOOK_SECONDS)
        return at

    def _look(self) -> None:
        """Give back what writers have let go of."""
        while self._copying and self._copying[0].done():
            self._copying.popleft().result()
        for _ in range(self._writers.let_go()):
            self._ring.give_back()

    def _size(self, tokens: int) -> int:
        return aligned(self._token_bytes * tokens) + aligned(4 * tokens)


def _joined(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Neighbours in memory as one, so that few copies are made."""
    last: _Piece | None = None
    for piece in pieces:
        if last is not None and _follows(last.token_ids, piece.token_ids):
            last = _Piece(_both(last.states, piece.states), _both(last.token_ids, piece.token_ids))
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _follows(first: Any, second: Any) -> bool:
    """Whether a slice lies right behind another of the same tensor."""
    return bool(
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def _both(first: Any, second: Any) -> Any:
    size = (len(first) + len(second), *first.shape[1:])
    return first.as_strided(size, first.stride())


def _lay_out(pieces: Iterable[_Piece], states: Any, token_ids: Any) -> None:
    """One after the other."""
    at = 0
    for piece in pieces:
        after = at + len(piece.token_ids)
        states[at:after].copy_(piece.states, non_blocking=True)
        token_ids[at:after].copy_(piece.token_ids, non_blocking=True)
        at = after
