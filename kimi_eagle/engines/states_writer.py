"""The writer of shards: a process beside the engine (see `engines.connector`). A program.

Rows are checked and digested by several threads, placed in the order they came, written by several
threads, and told to the client in the order they came (`states.spool`).
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import socket
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from kimi_eagle.states.checks import OTHER_TOKENS, BadStates, check_states
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.shard_file import OpenShard
from kimi_eagle.states.spool import CLOSE, Journal
from kimi_eagle.states.stored_row import StoredRow, store

# How long it sleeps when nothing comes, seconds: how late it notices that it is asked to close.
_IDLE = 0.01
_MESSAGE = 1 << 20
_YIELDS = 10
_FOLDER = re.compile(r"[A-Za-z0-9_-]{0,64}", re.ASCII)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass
class _Row:
    key: str
    folder: str
    ids: memoryview
    tokens: int
    checked: Future[StoredRow | BadStates]
    shard: OpenShard | None = None
    start: int = 0
    filled: Future[None] | None = None
    wrong: BadStates | None = None
    digest: str = ""
    lost: Mapping[str, Any] | None = None


class _Folder:
    """What is written for one client."""

    def __init__(self, path: Path, contract: LayerContract):
        self.path = path
        self.journal = Journal(path, contract)
        self.open: OpenShard | None = None


class Writer:
    def __init__(self, given: Mapping[str, Any]):
        self._spool = Path(given["spool"])
        self._contract = LayerContract.of(given["contract"])
        self._limit = int(given["shard_bytes"])
        self._socket = socket.socket(fileno=given["socket"])
        memory = mmap.mmap(given["ring"], given["ring_bytes"])
        self._memory = memoryview(memory)
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(given["threads"])
        self._checking: deque[_Row] = deque()
        self._filling: deque[_Row] = deque()
        self._folders: dict[str, _Folder] = {}

    def run(self) -> None:
        """Until the engine is gone; what it still had under way is not wanted then."""
        while True:
            waits = 0.0 if self._settled() else _IDLE / 5 if self._busy() else _IDLE
            ready, _, _ = select.select([self._socket], [], [], waits)
            if ready:
                message = self._socket.recv(_MESSAGE)
                if not message:
                    break
                for row in json.loads(message):
                    self._take(*row)
            was_busy = self._busy()
            self._advance()
            if not self._busy() and (was_busy or not ready):
                self._close_asked()

    def _busy(self) -> bool:
        return bool(self._checking or self._filling)

    def _settled(self) -> bool:
        """Whether a row can be taken on at once."""
        first, second = self._checking, self._filling
        return bool(first and first[0].checked.done()) or bool(
            second and (second[0].filled is None or second[0].filled.done())
        )

    def _take(
        self, key: str, folder: str, ids: str, tokens: int, states_at: int, ids_at: int
    ) -> None:
        size = tokens * self._contract.engine_bytes_per_token
        tensor = self._whole[states_at : states_at + size].view(torch.bfloat16)
        tensor = tensor.view(tokens, len(self._contract.layers), self._contract.hidden_size)
        given = self._memory[ids_at : ids_at + 4 * tokens]
        checked = self._pool.submit(self._check, tensor, given, ids)
        self._checking.append(_Row(key, folder, given, tokens, checked))

    def _check(self, tensor: Any, given: memoryview, ids: str) -> StoredRow | BadStates:
        """A row as it is stored, or what is wrong with it."""
        tokens, layers, hidden = tensor.shape
        if blake3(given).hexdigest() != ids:
            first = ", ".join(str(token) for token in given[:32].cast("i"))
            return BadStates(
                OTHER_TOKENS,
                f"the engine ran {tokens} tokens that are not those that were sent (it begins with "
                f"{first}): a BOS that it adds, or a prompt that it cuts",
            )
        none = torch.zeros(tokens, dtype=torch.int32)  # compared above
        try:
            check_states(tensor, none, none, layers, hidden)
        except BadStates as error:
            return error
        return store(tensor, self._contract)

    def _advance(self) -> None:
        """Take rows on, in the order they came, as far as that is possible."""
        while self._checking and self._checking[0].checked.done():
            row = self._checking.popleft()
            found = row.checked.result()
            if isinstance(found, BadStates):
                row.wrong = found
            if not _KEY.fullmatch(row.key) or not _FOLDER.fullmatch(row.folder):
                row.folder, row.wrong = "", BadStates("no-key", f"{row.key[:64]!r} is no row key")
            if row.wrong is None:
                assert isinstance(found, StoredRow)
                self._place(row, found)
            self._filling.append(row)
        ended = 0
        while self._filling and (self._filling[0].filled is None or self._filling[0].filled.done()):
            self._tell(self._filling.popleft())
            ended += 1
        if ended:
            self._socket.send(bytes(ended))

    def _folder(self, name: str) -> _Folder:
        if name not in self._folders:
            self._folders[name] = _Folder(self._spool / name, self._contract)
        return self._folders[name]

    def _place(self, row: _Row, stored: StoredRow) -> None:
        folder = self._folder(row.folder)
        if folder.open is None:
            folder.open = OpenShard(folder.path, self._contract)
        row.shard = folder.open
        row.digest, row.lost = stored.digest, stored.lost
        ids = bytes(row.ids)
        row.start = row.shard.place(row.key, row.tokens, row.digest, ids, stored.scales)
        row.filled = self._pool.submit(row.shard.fill, row.start, stored.states)
        if folder.open.size >= self._limit:
            folder.open = None  # closed when its last row is filled, see below

    def _tell(self, row: _Row) -> None:
        folder = self._folder(row.folder)
        if row.shard is None or row.filled is None:
            assert row.wrong is not None
            line = {"refused": row.key, "reason": row.wrong.reason, "message": str(row.wrong)}
            folder.journal.say(line)
            return
        row.filled.result()
        row.shard.filled = row.start + row.tokens
        folder.journal.row(row.key, row.digest, row.shard.name, row.start, row.tokens, row.lost)
        last = row.start + row.tokens == row.shard.tokens
        if last and row.shard is not folder.open:
            folder.journal.say({"closed": row.shard.close()})

    def _close_asked(self) -> None:
        for folder in self._folders.values():
            if folder.open is not None and (folder.path / CLOSE).exists():
                folder.journal.say({"closed": folder.open.close()})
                folder.open = None

    def fail(self, text: str) -> None:
        for folder in self._folders.values():
            if folder.open is not None:
                folder.open.give_room()
            folder.journal.say({"failed": text})


def main() -> None:
    # The engine's own thread goes first: what it waits for a core, the GPU waits.
    os.nice(_YIELDS)
    given = json.loads(sys.argv[1])
    os.sched_setaffinity(0, given["cores"])
    torch.set_num_threads(1)
    writer = Writer(given)
    code = 0
    try:
        writer.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone
    except OSError as error:
        writer.fail(f"{error.strerror or error}: {error.filename or 'a shard'}")
        code = 1
    # Its threads may have rows in hand that nobody waits for.
    os._exit(code)


if __name__ == "__main__":
    main()
