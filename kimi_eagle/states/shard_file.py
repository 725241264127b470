"""The file of a shard while it is written: rows are placed one after another and filled in any
order. Needs neither torch nor numpy.

A shard is a safetensors file: `hidden_states` [tokens, layers, hidden], `offsets` int64 [rows + 1],
`token_ids` int32 [tokens], of fp8 states also `scales` fp32 [tokens, layers], with the layer
contract in its metadata; the `.json` beside it lists the rows. The room of the header is set aside
at the front, so that states are written once, as they come, and never gathered in memory. Until it
is closed its name ends with `.partial`, and a `.ids` (and `.scales`) beside it keeps the token ids:
what lies there when its writer is killed can be closed by another (`salvage`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from struct import pack, unpack
from typing import Any

from blake3 import blake3

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.states.contract import BF16, FP8, LayerContract

PARTIAL = ".partial"
IDS = ".ids"
SCALES = ".scales"

# States begin here, on a page of their own.
_HEADER = 4096
# What is left free of a disk: the registry and the records of shards must be written still.
_MARGIN = 128 << 10
# How long a killed writer is given to be gone.
_GONE_SECONDS = 10.0
_DTYPES = {BF16: "BF16", FP8: "F8_E4M3"}


@dataclass(frozen=True)
class Listed:
    """A row in a shard: `tokens` rows of its tensor from `start` on."""

    key: str
    start: int
    tokens: int
    digest: str


class OpenShard:
    """A shard that is being written."""

    def __init__(self, folder: Path, contract: LayerContract, name: str | None = None):
        """Raises: OSError: it cannot be made."""
        self.name = name or f"{secrets.token_hex(8)}.safetensors"
        self.tokens = 0
        """Tokens placed so far."""
        self.filled = 0
        """Of these, how many from the first on are filled, as the writer counts them."""
        self._path = folder / self.name
        self._contract = contract
        self._rows: list[Listed] = []
        flags = os.O_RDWR | os.O_CREAT | (0 if name else os.O_EXCL)
        self._states = os.open(self._path.with_suffix(PARTIAL), flags, 0o644)
        self._descriptors: tuple[int, ...] = (self._states,)
        try:
            # Held until its writer is gone, however it goes: see `salvage`.
            _lock(self._states)
            self._ids = os.open(self._path.with_suffix(IDS), flags, 0o644)
            self._descriptors += (self._ids,)
            if contract.scales_bytes_per_token:
                self._scales = os.open(self._path.with_suffix(SCALES), flags, 0o644)
                self._descriptors += (self._scales,)
        except OSError:
            self.release()
            raise

    @property
    def size(self) -> int:
        """Bytes of the states placed so far, and of their scales."""
        return self.tokens * self._contract.bytes_per_token

    def place(self, key: str, tokens: int, digest: str, ids: bytes, scales: bytes = b"") -> int:
        """Give a row its place, after those before it; returns the token it starts at.

        Args:
            digest: of its states and scales, hex.
            ids: its token ids, int32 little endian [tokens].
            scales: of its states, fp32 [tokens, layers], where the contract has them.
        """
        start = self.tokens
        _write(self._ids, ids, 4 * start)
        if scales:
            _write(self._scales, scales, start * self._contract.scales_bytes_per_token)
        self._rows.append(Listed(key, start, tokens, digest))
        self.tokens += tokens
        return start

    def fill(self, start: int, states: memoryview | bytes) -> None:
        """Write a placed row's states [tokens, layers, hidden], as they lie in memory.

        May be called from several threads at once. Raises: OSError: the disk is full, but for what
        the store needs to take in what is whole.
        """
        disk = os.fstatvfs(self._states)
        tail = self.tokens * (4 + self._contract.scales_bytes_per_token)  # see `close`
        if disk.f_bavail * disk.f_frsize < len(states) + tail + _MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        _write(self._states, states, _HEADER + start * self._contract.states_bytes_per_token)

    def close(self) -> str:
        """Write what is left of the file; returns its name, under which it is found now."""
        width, layers = self._contract.hidden_size, len(self._contract.layers)
        offsets = [0, *(row.start + row.tokens for row in self._rows)]
        ends = [self.tokens * self._contract.states_bytes_per_token]
        ends.append(ends[-1] + 8 * len(offsets))
        ends.append(ends[-1] + 4 * self.tokens)
        ends.append(ends[-1] + self.tokens * self._contract.scales_bytes_per_token)
        header: dict[str, Any] = {
            "__metadata__": {"contract": json.dumps(self._contract.document(), sort_keys=True)},
            "hidden_states": {
                "dtype": _DTYPES[self._contract.dtype],
                "shape": [self.tokens, layers, width],
                "data_offsets": [0, ends[0]],
            },
            "offsets": {
                "dtype": "I64",
                "shape": [len(offsets)],
                "data_offsets": [ends[0], ends[1]],
            },
            "token_ids": {
                "dtype": "I32",
                "shape": [self.tokens],
                "data_offsets": [ends[1], ends[2]],
            },
        }
        tail = pack(f"<{len(offsets)}q", *offsets) + os.pread(self._ids, 4 * self.tokens, 0)
        if self._contract.scales_bytes_per_token:
            header["scales"] = {
                "dtype": "F32",
                "shape": [self.tokens, layers],
                "data_offsets": [ends[2], ends[3]],
            }
            tail += os.pread(self._scales, ends[3] - ends[2], 0)
        text = json.dumps(header).encode("ascii")
        room = _HEADER - 8
        if len(text) > room:
            raise ValueError(f"the contract is too long for the header of a shard: {len(text)} B")
        _write(self._states, tail, _HEADER + ends[0])
        _write(self._states, pack("<Q", room) + text.ljust(room), 0)
        os.ftruncate(self._states, _HEADER + ends[3])
        write_json(
            self._path.with_suffix(".json"),
            {
                "contract": self._contract.document(),
                "rows": [[row.key, row.start, row.tokens, row.digest] for row in self._rows],
            },
        )
        self._path.with_suffix(PARTIAL).rename(self._path)
        self._path.with_suffix(IDS).unlink()
        self._path.with_suffix(SCALES).unlink(missing_ok=True)
        self.release()
        return self.name

    def give_room(self) -> None:
        """Take what is not filled off the file: the disk is full, and what is whole needs a little
        room to be taken into the store."""
        os.ftruncate(self._states, _HEADER + self.filled * self._contract.states_bytes_per_token)

    def cut(self) -> None:
        """Take what lies behind the rows that are placed off the file."""
        os.ftruncate(self._states, _HEADER + self.tokens * self._contract.states_bytes_per_token)

    def release(self) -> None:
        """Let go of its files, as they are."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()


def content_digest(states: Any, scales: bytes = b"") -> str:
    """BLAKE3 of a row: of its states [tokens, layers, hidden] as they are stored, then of their
    scales."""
    hasher = blake3(states)
    hasher.update(scales)
    return hasher.hexdigest()


def read_row(folder: Path, name: str, row: Listed, contract: LayerContract) -> tuple[bytes, bytes]:
    """A filled row's states and scales, whether its shard is closed by now or not."""
    path = folder / name
    for suffix in (PARTIAL, ".safetensors"):
        try:
            with path.with_suffix(suffix).open("rb") as file:
                file.seek(_HEADER + row.start * contract.states_bytes_per_token)
                states = file.read(row.tokens * contract.states_bytes_per_token)
            return states, _scales_of(path, suffix, row, contract)
        except FileNotFoundError:  # it was closed meanwhile
            continue
    raise FileNotFoundError(path)


def _scales_of(path: Path, suffix: str, row: Listed, contract: LayerContract) -> bytes:
    each = contract.scales_bytes_per_token
    if not each:
        return b""
    if suffix == PARTIAL:
        with path.with_suffix(SCALES).open("rb") as file:
            file.seek(row.start * each)
            return file.read(row.tokens * each)
    with path.open("rb") as file:
        (length,) = unpack("<Q", file.read(8))
        (begin, _) = json.loads(file.read(length))["scales"]["data_offsets"]
        file.seek(8 + length + begin + row.start * each)
        return file.read(row.tokens * each)


def salvage(folder: Path, name: str, rows: Iterable[Listed], contract: LayerContract) -> str | None:
    """Close a shard whose writer is gone, with the rows that were filled; None when there are none.

    Args:
        rows: those that the writer said were filled. One that is not there after all (the machine
            went down), and those that follow it, are left out.
    """
    path = folder / name
    if not path.with_suffix(PARTIAL).exists():
        return None
    shard = OpenShard(folder, contract, name)
    try:
        ids = path.with_suffix(IDS).read_bytes()
        for row in sorted(rows, key=lambda row: row.start):
            states, scales = read_row(folder, name, row, contract)
            if row.start == shard.tokens and content_digest(states, scales) == row.digest:
                span = slice(4 * row.start, 4 * (row.start + row.tokens))
                shard.place(row.key, row.tokens, row.digest, ids[span], scales)
        shard.cut()  # on a full disk, this is the room for the rest
        return shard.close() if shard.tokens else None
    finally:
        shard.release()


def _lock(descriptor: int) -> None:
    """Raises: OSError: a writer that should be gone is not, after some seconds."""
    until = time.monotonic() + _GONE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def _write(descriptor: int, data: memoryview | bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
