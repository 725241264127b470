"""Read rows of hidden states out of shards. Imports torch."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.states.fp8 import decode
from kimi_eagle.states.index import Place
from kimi_eagle.states.layout import shard_path
from kimi_eagle.verifiers.folder import safetensors_header

# A mapped shard takes address space, and neither memory nor a file descriptor.
_OPEN = 4096

# Linux 5.14: map what a range is backed by at once, rather than by a fault for every few pages.
_POPULATE_READ = 22
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}


@dataclass(frozen=True)
class _Shard:
    states: Any
    ids: Any
    scales: Any
    """Of fp8 states; else None."""


class ShardReader:
    """Reads single rows out of shards, mapped rather than loaded."""

    def __init__(self, root: Path):
        self._root = root
        self._open = lru_cache(maxsize=_OPEN)(self._open_shard)

    def __getstate__(self) -> dict[str, Any]:
        return {"_root": self._root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_root"])  # type: ignore[misc]

    def _open_shard(self, digest: str) -> _Shard:
        path = shard_path(self._root, digest)
        header = safetensors_header(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        # Private: whoever writes into a row he was given writes into memory of his own.
        mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        data = torch.tensor([], dtype=torch.uint8).set_(mapped)[8 + length :]
        scales = _view(data, header["scales"]) if "scales" in header else None
        return _Shard(
            _view(data, header["hidden_states"]), _view(data, header["token_ids"]), scales
        )

    def read(self, place: Place) -> tuple[Any, Any]:
        """(states [tokens, layers, hidden], token ids int32 [tokens]) of one row.

        Both look into the mapped shard: nothing is copied, but that fp8 states become bfloat16.
        The pages of the row are read from the disk, where memory does not have them yet.

        Raises:
            OSError: the shard is gone.
            VerifierError: it is no safetensors file.
            ValueError: it ends before the row does.
        """
        shard = self._open(place.shard)
        end = place.start + place.tokens
        if end > len(shard.ids) or end > len(shard.states):
            raise ValueError(
                f"shard {place.shard[:12]} holds {len(shard.ids)} tokens, a row of it ends at "
                f"{end}: run `kimi-eagle verify --all`"
            )
        states = shard.states[place.start : end]
        _populate(states)
        if shard.scales is not None:
            states = decode(states, shard.scales[place.start : end])
        return states, shard.ids[place.start : end]


def _view(data: Any, entry: Mapping[str, Any]) -> Any:
    """A tensor of a safetensors file, in place."""
    start, end = entry["data_offsets"]
    return data[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])


def _populate(states: Any) -> None:
    """Have a row's pages in place before they are read one by one. Older kernels decline, and then
    the pages come as they are used."""
    start = states.data_ptr()
    aligned = start - start % mmap.PAGESIZE
    _madvise(aligned, start + states.nbytes - aligned, _POPULATE_READ)
