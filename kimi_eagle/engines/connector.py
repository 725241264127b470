"""vLLM's side of extraction: a KV connector that hands the states of whole batches to a writer.

    --kv-transfer-config '{"kv_connector": "StatesConnector",
        "kv_connector_module_path": "kimi_eagle.engines.connector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"spool": "/where/the/client/looks"}}'

vLLM's `extract_hidden_states` keeps the states of a request in blocks of a cache of its own. When
requests have ended, their states are gathered in one go, copied into a ring of memory that is
shared with writer processes (`engines.states_writer`), and their blocks are given back. On a GPU
nothing here waits for it: the copy runs on a stream of its own, from and to pinned memory. When
the ring is full, blocks are kept until the writer has caught up: a slow disk slows the engine, and
memory stays bounded.

A request asks for its states with `kv_transfer_params: {"states": "<key> <ids> <folder>"}`: its row
key, the digest of the token ids it means (`engines.todo`), and a folder of the spool, or nothing.
One that does not ask is served as ever. It builds on vLLM's example connector for what differs
from version to version of vLLM: where the cache is and how it is laid out.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kimi_eagle.engines.pinned import tensor_over
from kimi_eagle.engines.ring import Ring, aligned
from kimi_eagle.engines.writer_process import Writers
from kimi_eagle.states.contract import BF16, LayerContract

RING_BYTES = 1 << 30

# Rows of one message to a writer: it must fit into a socket's buffer.
_GROUP = 256
# Groups that the ring has room for: while some are written by a writer each, others are copied.
_GROUPS = 16


@dataclass
class Save:
    """A request that has ended, whose states are in the cache still."""

    request: str
    key: str
    folder: str
    ids_digest: str
    token_ids: Any
    """`array` of int32 [tokens]."""
    blocks: list[int]
    """Of the cache, in order."""


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers."""

    saves: list[Save] = field(default_factory=list)


@dataclass
class _Group:
    """Saves that are copied together."""

    saves: list[Save]
    blocks: Any
    """int64 [blocks], in the ring: of all saves, one after the other."""
    states_at: int
    ids_at: int
    held: tuple[Any, ...] = ()
    """What must live until the copy is done."""
    event: Any = None


class StatesConnector(example.ExampleHiddenStatesConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._spool = extra("spool", None)
        if self._spool is None:
            raise ValueError("StatesConnector: kv_connector_extra_config lacks `spool`, a folder")
        self._shard_bytes = int(extra("shard_bytes", 512 << 20))
        self._ring_bytes = int(extra("ring_bytes", RING_BYTES))
        self._processes = int(extra("writers", 0))
        spec = vllm_config.speculative_config.draft_model_config.hf_config
        self._contract = LayerContract(
            layers=tuple(spec.eagle_aux_hidden_state_layer_ids),
            hidden_size=vllm_config.model_config.get_hidden_size(),
            dtype=extra("dtype", BF16),
            numerics="vllm",
        )
        self._ended: list[Save] = []  # the scheduler's
        self._waiting: deque[Save] = deque()  # the rest is the worker's
        self._copying: deque[_Group] = deque()
        self._writers: Writers | None = None
        self._ring = Ring(self._ring_bytes)

    # Of the scheduler

    def get_finished_count(self) -> int:
        """One notice a request: rank 0 alone copies."""
        return 1

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        found = Saves(self._ended)
        self._ended = []
        return found

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        asked = (request.kv_transfer_params or {}).get("states")
        ids = request.prompt_token_ids
        if not asked or not ids or request.num_computed_tokens < len(ids):
            return False, None  # nobody asked, or it was aborted before its end
        key, ids_digest, folder = (*str(asked).split(" "), "", "", "")[:3]
        needed = -(-len(ids) // self._block_size)
        save = Save(
            request.request_id, key, folder, ids_digest, array("i", ids), block_ids[:needed]
        )
        self._ended.append(save)
        return True, {"states": asked}

    # Of the workers

    def wait_for_save(self) -> None:
        """Nothing to wait for: states are copied after their request has ended."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if not self._is_tp_rank_zero:
            return
        self._blocks_of_cache = _by_block(self._kv_cache)
        self._block_bytes = self._block_size * self._contract.engine_bytes_per_token
        cuda = self._kv_cache.device.type == "cuda"
        self._writers = Writers(
            self._spool, self._contract, self._shard_bytes, self._ring_bytes, self._processes
        )
        self._memory = tensor_over(self._writers.memory, pinned=cuda)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        if self._writers is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, Saves):
                self._waiting.extend(metadata.saves)
        for _ in range(self._writers.let_go()):
            self._ring.give_back()
        while (group := self._next_group()) is not None:
            self._copy(group)
        done: set[str] = set()
        while self._copying and self._copied(self._copying[0]):
            group = self._copying.popleft()
            self._hand_over(group)
            done.update(save.request for save in group.saves)
        return done or None, None

    def shutdown(self) -> None:
        if self._writers is not None:
            self._writers.end()

    def _next_group(self) -> _Group | None:
        """As many of the waiting as the ring has room for, and at most its share of it, but one."""
        room, saves = self._ring.room(), list[Save]()
        tokens = blocks = 0
        while self._waiting and len(saves) < _GROUP:
            first = self._waiting[0]
            size = self._size(blocks + len(first.blocks), tokens + len(first.token_ids))
            if size > room or (saves and size > self._ring.size // _GROUPS):
                break
            saves.append(self._waiting.popleft())
            blocks, tokens = blocks + len(first.blocks), tokens + len(first.token_ids)
        if not saves:
            if self._waiting:
                self._require_room(self._waiting[0])
            return None
        at = self._ring.take(self._size(blocks, tokens))
        assert at is not None, "there was room"
        assert self._writers is not None
        states_at = at + aligned(8 * blocks)
        ids_at = states_at + aligned(self._block_bytes * blocks)
        # Plain copies: torch shares out those of more than 32 KiB among threads, and waits for each
        # of them to get a core.
        numbers = array("q", [block for save in saves for block in save.blocks])
        self._writers.memory[at : at + 8 * blocks] = numbers.tobytes()
        self._writers.memory[ids_at : ids_at + 4 * tokens] = b"".join(
            [save.token_ids for save in saves]
        )
        listed = self._memory[at : at + 8 * blocks].view(torch.int64)
        return _Group(saves, listed, states_at, ids_at)

    def _copy(self, group: _Group) -> None:
        """Gather the blocks of a group and copy them into the ring."""
        cache, count = self._blocks_of_cache, len(group.blocks)
        target = self._memory[group.states_at : group.states_at + self._block_bytes * count]
        target = target.view(torch.bfloat16).view(count, *cache.shape[1:])
        if cache.device.type != "cuda":
            torch.index_select(cache, 0, group.blocks, out=target)
        else:
            ready = torch.cuda.Event()
            ready.record()
            stream = self._get_copy_stream()
            with torch.cuda.stream(stream):
                # Before the wait: what comes from pinned memory need not wait for the forward.
                blocks = group.blocks.to(cache.device, non_blocking=True)
                stream.wait_event(ready)
                states = torch.index_select(cache, 0, blocks)
                target.copy_(states, non_blocking=True)
                group.event = torch.cuda.Event()
                group.event.record(stream)
            group.held = (blocks, states)
        self._copying.append(group)

    @staticmethod
    def _copied(group: _Group) -> bool:
        return group.event is None or bool(group.event.query())

    def _hand_over(self, group: _Group) -> None:
        assert self._writers is not None
        states_at, ids_at, rows = group.states_at, group.ids_at, []
        for save in group.saves:
            count = len(save.token_ids)
            rows.append((save.key, save.folder, save.ids_digest, count, states_at, ids_at))
            states_at += self._block_bytes * len(save.blocks)
            ids_at += 4 * count
        self._writers.hand_over(rows)

    def _size(self, blocks: int, tokens: int) -> int:
        """Bytes of the ring for a group: its blocks' numbers, their states, the token ids."""
        return aligned(8 * blocks) + aligned(self._block_bytes * blocks) + aligned(4 * tokens)

    def _require_room(self, save: Save) -> None:
        """Raises: RuntimeError: the ring will never have room for a row."""
        needed = self._size(len(save.blocks), len(save.token_ids))
        if needed > self._ring.size:
            raise RuntimeError(
                f"a row of {len(save.token_ids)} tokens takes {needed} bytes, the ring has "
                f"{self._ring.size}: raise engine.buffer_mib (`ring_bytes` of the connector)"
            )


def _by_block(cache: Any) -> Any:
    """The cache as [blocks, tokens of a block, layers, hidden], over the same memory.

    Which of the two middle axes are the tokens differs between versions of vLLM, and which is the
    outer one in memory between its attention backends: vLLM's own reading of a small cache tells.
    """
    first, second = cache.shape[1:3]
    numbers = torch.arange(first * second).view(1, first, second, 1)
    token = example.extract_from_kv_cache(numbers, torch.tensor([1]), 1).flatten()
    return cache if torch.equal(token, numbers[0, 1, :, 0]) else cache.permute(0, 2, 1, 3)
