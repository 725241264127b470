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
from kimi_eagle.states.index import Place, StateIndex
from kimi_eagle.states.reader import ShardReader

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


def cosine_distances(a: Any, b: Any) -> Any:
    """1 - cosine of each vector of `a` and its like in `b`, [tokens, hidden]; two vectors of
    zeros are as near as can be."""
    x, y = a.double(), b.double()
    lengths = x.norm(dim=-1) * y.norm(dim=-1)
    cosine = (x * y).sum(dim=-1) / lengths.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where((x == y).all(dim=-1), torch.zeros_like(cosine), 1 - cosine)


def compare_states(job: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of hidden states as two stores hold them.

    Args: `a`, `b`: `{root, registry}` of the stores; `rows`: `[key, digest in a, digest in b]`.
    Returns: `compared` rows, and the largest `cosine_distance` of a token's last layer and the
        largest absolute difference in any layer (`max_abs`) among them.
    """
    keys = [row[0] for row in job["rows"]]
    found = []
    for side, digests in (
        ("a", [row[1] for row in job["rows"]]),
        ("b", [r[2] for r in job["rows"]]),
    ):
        index = StateIndex(Path(job[side]["registry"]))
        places = index.places(keys)
        index.close()
        wanted = zip(keys, digests, strict=True)
        held = [_held(places.get(key), digest) for key, digest in wanted]
        found.append((ShardReader(Path(job[side]["root"])), held))
    (reader, held), (other_reader, other_held) = found
    compared, farthest, largest = 0, 0.0, 0.0
    for place, other in zip(held, other_held, strict=True):
        if place is None or other is None:
            continue
        x, y = reader.read(place)[0], other_reader.read(other)[0]
        if x.shape != y.shape:
            continue
        compared += 1
        farthest = max(farthest, float(cosine_distances(x[:, -1], y[:, -1]).max()))
        largest = max(largest, float((x.double() - y.double()).abs().max()))
    return {"compared": compared, "cosine_distance": farthest, "max_abs": largest}


def _held(place: Place | None, digest: str) -> Place | None:
    """The place of a row, if what lies there is what is meant."""
    return place if place is not None and place.digest == digest else None


def compare(job: Mapping[str, Any]) -> dict[str, Any]:
    """`{a, b}` → `{tensors: {file: [difference, …]}}` for the safetensors files both have;
    `{states: …}` → `{states: …}`, see `compare_states`."""
    if "states" in job:
        return {"states": compare_states(job["states"])}
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
