"""The engine's end of the writers of shards: child processes, a ring of memory, and a socket each.

There are several where there are cores for them: what one process writes goes through one lock, of
its interpreter and of the file. A message is JSON, rows `[key, folder, ids, tokens, states_at,
ids_at]`; a writer answers with one byte for each row that it has let go of, in the order they were
handed over. Imports no engine.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from kimi_eagle.engines.launch import cores_of_engine
from kimi_eagle.states.contract import LayerContract

# Of each process: one core looks rows through and digests them, while another writes.
_THREADS = 2
_MOST_PROCESSES = 8


@dataclass
class _HandedOver:
    left: int
    """Rows that their writer has not let go of."""


class Writers:
    """Several writers of one ring, as one; one thread may hand over while another looks."""

    def __init__(
        self,
        spool: str,
        contract: LayerContract,
        shard_bytes: int,
        ring_bytes: int,
        processes: int = 0,
    ):
        """Args: `processes`: 0: as many as the cores allow."""
        # A file without a name: it is bounded, goes with its last user, and needs no /dev/shm.
        ring = os.memfd_create("states-ring")
        os.ftruncate(ring, ring_bytes)
        self.memory = mmap.mmap(ring, ring_bytes)
        cores = len(cores_of_engine())
        count = processes or max(1, min(_MOST_PROCESSES, cores // 2))
        threads = max(1, min(_THREADS, cores // 2))
        self._writers = [
            WriterProcess(spool, contract, shard_bytes, ring, ring_bytes, threads)
            for _ in range(count)
        ]
        os.close(ring)
        self._lock = Lock()
        self._all: deque[_HandedOver] = deque()
        self._of_each: list[deque[_HandedOver]] = [deque() for _ in self._writers]

    def hand_over(self, rows: Sequence[tuple[str, str, str, int, int, int]]) -> None:
        """The rows of one region of the ring, see `WriterProcess.hand_over`."""
        with self._lock:
            in_hand = [sum(group.left for group in groups) for groups in self._of_each]
            # The first of those that are idle: an engine that one can follow has one shard at a
            # time.
            chosen = in_hand.index(min(in_hand))
            self._writers[chosen].hand_over(rows)
            group = _HandedOver(len(rows))
            self._all.append(group)
            self._of_each[chosen].append(group)

    def let_go(self) -> int:
        """How many regions may be given back, oldest first, since it was last asked.

        Raises: RuntimeError: a writer has ended.
        """
        with self._lock:
            for writer, groups in zip(self._writers, self._of_each, strict=True):
                count = writer.done()
                while count:
                    now = min(count, groups[0].left)
                    groups[0].left -= now
                    count -= now
                    if not groups[0].left:
                        groups.popleft()
            regions = 0
            while self._all and not self._all[0].left:
                self._all.popleft()
                regions += 1
            return regions

    def end(self) -> None:
        for writer in self._writers:
            writer.end()


class WriterProcess:
    """Starts a writer; ends with it."""

    def __init__(
        self,
        spool: str,
        contract: LayerContract,
        shard_bytes: int,
        ring: int,
        ring_bytes: int,
        threads: int,
    ):
        """Args: `ring`: the descriptor of its memory."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {
            "spool": spool,
            "contract": contract.document(),
            "shard_bytes": shard_bytes,
            "ring_bytes": ring_bytes,
            "ring": ring,
            "socket": theirs.fileno(),
            "threads": threads,
            "cores": sorted(cores_of_engine()),
        }
        # Its threads are few and copy bytes; it must not wait for an engine's OpenMP library.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env.pop("LD_PRELOAD", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kimi_eagle.engines.states_writer", json.dumps(given)],
            pass_fds=(ring, theirs.fileno()),
            env=env,
        )
        theirs.close()

    def hand_over(self, rows: Sequence[tuple[str, str, str, int, int, int]]) -> None:
        """Args: `rows`: key, folder in the spool, digest that the token ids must have, tokens,
        where the states and where the ids lie in the ring.

        Raises: RuntimeError: the writer has ended.
        """
        message = json.dumps(rows).encode("ascii")
        try:
            self._socket.send(message)
        except OSError as error:
            raise RuntimeError(f"the writer of hidden states has ended: {error}") from None

    def done(self) -> int:
        """How many rows it has let go of since it was last asked."""
        count = 0
        while True:
            try:
                data = self._socket.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return count
            except OSError as error:
                raise RuntimeError(f"the writer of hidden states has ended: {error}") from None
            if not data:
                raise RuntimeError("the writer of hidden states has ended")
            count += len(data)

    def end(self) -> None:
        self._socket.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
