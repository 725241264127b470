"""The engine's end of the writer of shards: a child process, a ring of memory, and a socket.

A message is JSON, rows `[key, folder, ids, tokens, states_at, ids_at]`; the writer answers
with one byte for each row that it has let go of, in the order they were handed over. Imports no
engine.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from kimi_eagle.states.contract import LayerContract


class WriterProcess:
    """Starts the writer; ends with it."""

    def __init__(
        self, spool: str, contract: LayerContract, shard_bytes: int, ring_bytes: int, threads: int
    ):
        # A file without a name: it is bounded, goes with its last user, and needs no /dev/shm.
        descriptor = os.memfd_create("states-ring")
        os.ftruncate(descriptor, ring_bytes)
        self.memory = mmap.mmap(descriptor, ring_bytes)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {
            "spool": spool,
            "contract": contract.document(),
            "shard_bytes": shard_bytes,
            "ring_bytes": ring_bytes,
            "ring": descriptor,
            "socket": theirs.fileno(),
            "threads": threads or max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
        }
        # Its threads are few and copy bytes; it must not wait for an engine's OpenMP library.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env.pop("LD_PRELOAD", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kimi_eagle.engines.states_writer", json.dumps(given)],
            pass_fds=(descriptor, theirs.fileno()),
            env=env,
        )
        theirs.close()
        os.close(descriptor)

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
