"""vLLM's example connector for hidden states, on a CPU.

The original copies through pinned memory on a CUDA stream; without an accelerator neither exists.
Only the copy differs: what is written, and the locks around it, are the original's.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Done:
    """Stands where the original keeps a CUDA event: the copy has happened already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(example.ExampleHiddenStatesConnector):  # type: ignore[misc]
    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        within = torch.arange(self._block_size, dtype=torch.long)
        slots = (within[None, :] + blocks[:, None] * self._block_size).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        event = _Done()
        tensors = {
            # A copy: the cache's blocks are given to the next request.
            "hidden_states": states.clone().contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, lock)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
