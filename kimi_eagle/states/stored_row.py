"""A row of hidden states as a shard holds it, and what storing it so has changed. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_eagle.states.contract import FP8, LayerContract
from kimi_eagle.states.fp8 import decode, encode
from kimi_eagle.states.shard_file import content_digest


@dataclass(frozen=True)
class StoredRow:
    """A row as it lies in a shard."""

    states: memoryview
    """Bytes of [tokens, layers, hidden]."""
    scales: bytes
    """fp32 [tokens, layers]; none for bfloat16."""
    digest: str
    """See `shard_file.content_digest`."""
    lost: Mapping[str, Sequence[float]]
    """`error` and `norm`: for each layer the sum of squares of what storing changed, and of the
    states; nothing for bfloat16."""


def store(states: Any, contract: LayerContract) -> StoredRow:
    """A row as a shard of the contract holds it. Args: `states`: bf16 [tokens, layers, hidden]."""
    scales, lost = b"", {}
    if contract.dtype == FP8:
        numbers, each = encode(states)
        changed = decode(numbers, each).float() - states.float()
        lost = {
            "error": changed.square().sum((0, 2)).tolist(),
            "norm": states.float().square().sum((0, 2)).tolist(),
        }
        states, scales = numbers, bytes(_bytes(each))
    data = _bytes(states)
    return StoredRow(data, scales, content_digest(data, scales), lost)


def as_stored(states: Any, contract: LayerContract) -> Any:
    """bf16 states as they will be read again."""
    return decode(*encode(states)) if contract.dtype == FP8 else states


def states_of(states: Any, scales: Any, contract: LayerContract) -> Any:
    """Stored bytes as bf16 [tokens, layers, hidden]. Args: writable buffers."""
    shape = (-1, len(contract.layers), contract.hidden_size)
    if contract.dtype != FP8:
        return torch.frombuffer(states, dtype=torch.bfloat16).view(shape)
    numbers = torch.frombuffer(states, dtype=torch.float8_e4m3fn).view(shape)
    return decode(numbers, torch.frombuffer(scales, dtype=torch.float32).view(shape[:2]))


class Lost:
    """What storing rows has changed, added up."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, lost: Mapping[str, Sequence[float]]) -> None:
        for name, values in lost.items():
            before = self._sums.get(name, [0.0] * len(values))
            self._sums[name] = [one + other for one, other in zip(before, values, strict=True)]

    def relative(self) -> list[float] | None:
        """For each layer the 2-norm of the change by that of the states; None of bfloat16."""
        if not self._sums:
            return None
        pairs = zip(self._sums["error"], self._sums["norm"], strict=True)
        return [round((error / norm) ** 0.5, 6) if norm else 0.0 for error, norm in pairs]


def _bytes(tensor: Any) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))
