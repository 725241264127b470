"""Take tensors out of safetensors files as they are: no value is converted, no library of arrays
is loaded, and no more than a block of them is in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.verifiers.folder import safetensors_header

_BLOCK = 16 << 20
_ALIGNMENT = 8

# The order in which the safetensors library writes types, so that equal tensors make equal files;
# tensors of one type come by name.
_TYPES = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file holds it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    size: int


def find(path: Path, name: str) -> StoredTensor:
    """Where a file holds a tensor. Raises: VerifierError when it is no safetensors file."""
    entry = safetensors_header(path)[name]
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    first, end = entry["data_offsets"]
    return StoredTensor(
        path, entry["dtype"], tuple(entry["shape"]), 8 + length + first, end - first
    )


def copy(tensors: Mapping[str, StoredTensor], target: Path) -> int:
    """Write a file with these tensors under these names; returns the bytes of tensors in it."""
    order = sorted(tensors, key=lambda name: (_rank(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size],
        }
        end += tensor.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in order:
            _append(tensors[name], file)
    return end


def _append(tensor: StoredTensor, target: Any) -> None:
    with tensor.path.open("rb") as source:
        source.seek(tensor.start)
        left = tensor.size
        while left:
            block = source.read(min(_BLOCK, left))
            if not block:
                raise OSError(f"{tensor.path} ended while it was read")
            target.write(block)
            left -= len(block)


def _rank(dtype: str) -> int:
    return _TYPES.index(dtype) if dtype in _TYPES else len(_TYPES)
