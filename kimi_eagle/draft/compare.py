"""Compare two folders of an artifact, file by file and tensor by tensor. Imports torch.

Run as a program (`python -m kimi_eagle.draft.compare JOB RESULT`), so that whoever asks need not
load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kimi_eagle.engines.launch import main

# An integer type of each floating type's width: neighbours in it are neighbours in the other.
_ORDERED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor differs; for one that is in one file only the figures are None."""

    name: str
    max_abs: float | None
    max_ulp: int | None
    """Largest distance in units in the last place of the tensor's own type."""
    differing: int | None
    """Elements that differ."""
    elements: int | None
    relative_norm: float | None
    """‖a - b‖ / ‖a‖."""


def compare_tensors(name: str, a: Any, b: Any) -> TensorDifference | None:
    """None when they are the same, bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return TensorDifference(name, None, None, None, None, None)
    if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
        return None
    x, y = a.double(), b.double()
    norm = float(x.norm())
    return TensorDifference(
        name,
        float((x - y).abs().max()),
        _ulp(a, b),
        int((a != b).sum()),
        a.numel(),
        float((x - y).norm()) / norm if norm else None,
    )


def _ulp(a: Any, b: Any) -> int | None:
    kind = _ORDERED.get(a.dtype)
    if kind is None:
        return None

    def ordered(tensor: Any) -> Any:
        bits = tensor.contiguous().view(kind).long()
        sign = 1 << (15 if kind == torch.int16 else 31)
        return torch.where(bits < 0, -(bits + sign), bits)

    return int((ordered(a) - ordered(b)).abs().max())


def compare_files(a: Path, b: Path) -> list[TensorDifference]:
    """The tensors of two safetensors files that differ, those that differ most first."""
    found = []
    with safe_open(a, framework="pt") as one, safe_open(b, framework="pt") as other:
        names, others = set(one.keys()), set(other.keys())
        for name in sorted(names | others):
            if name not in names or name not in others:
                found.append(TensorDifference(name, None, None, None, None, None))
                continue
            difference = compare_tensors(name, one.get_tensor(name), other.get_tensor(name))
            if difference is not None:
                found.append(difference)
    return sorted(found, key=lambda item: -(item.relative_norm or float("inf")))


def compare(job: Mapping[str, Any]) -> dict[str, Any]:
    """`{a, b}` → `{tensors: {file: [difference, …]}}` for the safetensors files both have."""
    a, b = Path(job["a"]), Path(job["b"])
    shared = {path.name for path in a.glob("*.safetensors")} & {
        path.name for path in b.glob("*.safetensors")
    }
    return {
        "tensors": {
            name: [asdict(item) for item in compare_files(a / name, b / name)]
            for name in sorted(shared)
        }
    }


if __name__ == "__main__":
    sys.exit(main(compare))
