"""Norms of the tensors of two folders of weights, and of their differences. Needs numpy, no torch.

Run as a program (`python -m kimi_eagle.draft.norms JOB RESULT`), so that whoever asks need not load
numpy.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.engines.launch import main
from kimi_eagle.verifiers.folder import safetensors_header

# Elements that are widened at once: 8 MiB as float64.
_CHUNK = 1 << 20
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}


@dataclass(frozen=True)
class TensorNorms:
    """A tensor of two folders; a figure is None where there is none, `note` then says why."""

    name: str
    a: float | None
    """‖a‖: the Euclidean norm over all elements, summed in float64."""
    b: float | None
    difference: float | None
    """‖b - a‖, of each element in the wider of the two types."""
    relative: float | None
    """‖b - a‖ / ‖a‖."""
    note: str | None = None


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def chunks(self) -> Iterator[Any]:
        """Its elements as float64, in parts of at most `_CHUNK`."""
        kind = "<u2" if self.dtype == "BF16" else _TYPES[self.dtype]
        if not self.elements:
            return
        raw: Any = np.memmap(
            self.path, dtype=kind, mode="r", offset=self.start, shape=(self.elements,)
        )
        for start in range(0, self.elements, _CHUNK):
            part = raw[start : start + _CHUNK]
            if self.dtype == "BF16":  # the upper half of a float32
                part = (part.astype(np.uint32) << 16).view(np.float32)
            yield part.astype(np.float64)


def norms(a: Path, b: Path) -> list[TensorNorms]:
    """Every tensor of two folders of safetensors, by name, however they are split into files.

    Raises: VerifierError: a file is not to be read as one.
    """
    one, other = _tensors(a), _tensors(b)
    return [_compared(name, one.get(name), other.get(name)) for name in sorted({*one, *other})]


def _tensors(folder: Path) -> dict[str, _Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = safetensors_header(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            found[name] = _Tensor(path, start, entry["dtype"], tuple(entry["shape"]))
    return found


def _compared(name: str, a: _Tensor | None, b: _Tensor | None) -> TensorNorms:
    if b is None:
        assert a is not None, "it is in one of the two"
        norm, note = _norm(a)
        return TensorNorms(name, norm, None, None, None, note or "in a alone")
    if a is None:
        norm, note = _norm(b)
        return TensorNorms(name, None, norm, None, None, note or "in b alone")
    if a.shape != b.shape:
        return TensorNorms(
            name, _norm(a)[0], _norm(b)[0], None, None, f"shape {_shape(a)} and {_shape(b)}"
        )
    unreadable = [tensor.dtype for tensor in (a, b) if not _readable(tensor)]
    if unreadable:
        return TensorNorms(name, None, None, None, None, f"type {unreadable[0]}")
    sums = np.zeros(3)
    for x, y in zip(a.chunks(), b.chunks(), strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            apart = y - x
            sums += [np.dot(x, x), np.dot(y, y), np.dot(apart, apart)]
    found = [_finite(float(value)) for value in np.sqrt(sums)]
    note = "not finite" if None in found else None
    if a.dtype != b.dtype:
        note = note or f"type {a.dtype} and {b.dtype}"
    before, after, difference = found
    relative = difference / before if difference is not None and before else None
    return TensorNorms(name, before, after, difference, relative, note)


def _norm(tensor: _Tensor) -> tuple[float | None, str | None]:
    if not _readable(tensor):
        return None, f"type {tensor.dtype}"
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(sum((np.dot(part, part) for part in tensor.chunks()), np.float64(0)))
    norm = _finite(math.sqrt(total)) if total >= 0 else None
    return norm, None if norm is not None else "not finite"


def _readable(tensor: _Tensor) -> bool:
    return tensor.dtype == "BF16" or tensor.dtype in _TYPES


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shape(tensor: _Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def compare(job: Mapping[str, Any]) -> dict[str, Any]:
    """`{a, b}` (folders) → `{norms: [{name, a, b, difference, relative, note}, …]}`."""
    return {"norms": [asdict(item) for item in norms(Path(job["a"]), Path(job["b"]))]}


if __name__ == "__main__":
    sys.exit(main(compare))
