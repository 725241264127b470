"""Digests of single tensors, so that two files can be told apart by name where only one of them is
at hand. Needs no library of tensors."""

from __future__ import annotations

import struct
import sys
from array import array
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Literal

from blake3 import blake3

from kimi_eagle.identity import digest_document
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import safetensors_header

_PART = 8 * 1024 * 1024


def tensor_digests(path: Path) -> dict[str, str]:
    """Name → digest of a tensor's type, shape and bytes, for a safetensors file.

    Raises:
        OSError: the file cannot be read as one.
    """
    try:
        header = safetensors_header(path)
    except VerifierError as error:
        raise OSError(str(error)) from None
    found = {}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        for name, entry in sorted(header.items()):
            start, end = entry["data_offsets"]
            found[name] = digest_document(
                "tensor/1",
                [entry["dtype"], entry["shape"], _digest(file, 8 + length + start, end - start)],
            )
    return found


def _digest(file: BinaryIO, start: int, length: int) -> str:
    hasher = blake3()
    file.seek(start)
    while length:
        part = file.read(min(length, _PART))
        if not part:
            raise OSError(f"{file.name} ends within a tensor")
        hasher.update(part)
        length -= len(part)
    return hasher.hexdigest()


def counts(path: Path, name: str) -> dict[int, int]:
    """How often each value occurs in an int32 tensor of a safetensors file.

    Raises:
        OSError: the file cannot be read as one, or has no such tensor.
    """
    return dict(Counter(numbers(path, name, "I32")))


def numbers(path: Path, name: str, dtype: Literal["I32", "I64"]) -> array[int]:
    """A tensor of whole numbers of a safetensors file, flat.

    Raises:
        OSError: the file cannot be read as one, or has no such tensor of this type.
    """
    try:
        entry = safetensors_header(path)[name]
    except (VerifierError, KeyError) as error:
        raise OSError(f"{path}: {error}") from None
    if entry["dtype"] != dtype:
        raise OSError(f"{path}: {name} is {entry['dtype']}, not {dtype}")
    start, end = entry["data_offsets"]
    found = array("i" if dtype == "I32" else "q")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + length + start)
        found.frombytes(file.read(end - start))
    if sys.byteorder == "big":
        found.byteswap()
    return found
