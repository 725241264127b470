"""Hidden states as fp8, and what that costs. Imports torch.

A state (one token's, of one layer) is its numbers divided by a scale, as e4m3: 1 sign, 4 exponent
and 3 mantissa bits, largest number 448 (Micikevicius et al. 2022). The scale is fp32 and brings the
state's largest number to 448: a token whose states are a thousand times the others' (verifiers have
such, the first of a row above all) leaves theirs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kimi_eagle.states.contract import FP8, LayerContract
from kimi_eagle.states.shard_file import content_digest

_LARGEST = 448.0


@dataclass(frozen=True)
class Stored:
    """A row as it lies in a shard."""

    states: memoryview
    """Bytes of [tokens, layers, hidden]."""
    scales: bytes
    """fp32 [tokens, layers]; none for bfloat16."""
    lost: Mapping[str, Sequence[float]]
    """`error` and `norm`: for each layer the sum of squares of what storing changed, and of the
    states; nothing for bfloat16."""

    @cached_property
    def digest(self) -> str:
        return content_digest(self.states, self.scales)


def stored(states: Any, contract: LayerContract) -> Stored:
    """A row as a shard of the contract holds it. Args: `states`: bf16 [tokens, layers, hidden]."""
    if contract.dtype != FP8:
        return Stored(_bytes(states), b"", {})
    numbers, scales = encode(states)
    changed = decode(numbers, scales).float() - states.float()
    lost = {
        "error": changed.square().sum((0, 2)).tolist(),
        "norm": states.float().square().sum((0, 2)).tolist(),
    }
    return Stored(_bytes(numbers), bytes(_bytes(scales)), lost)


def as_stored(states: Any, contract: LayerContract) -> Any:
    """bf16 states as they will be read again."""
    return decode(*encode(states)) if contract.dtype == FP8 else states


def read(states: Any, scales: Any, contract: LayerContract) -> Any:
    """Stored bytes as bf16 [tokens, layers, hidden].

    Args: `states`, `scales`: writable buffers of what `stored` gave.
    """
    shape = (-1, len(contract.layers), contract.hidden_size)
    if contract.dtype != FP8:
        return torch.frombuffer(states, dtype=torch.bfloat16).view(shape)
    numbers = torch.frombuffer(states, dtype=torch.float8_e4m3fn).view(shape)
    return decode(numbers, torch.frombuffer(scales, dtype=torch.float32).view(shape[:2]))


def encode(states: Any) -> tuple[Any, Any]:
    """(e4m3 [tokens, layers, hidden], fp32 scales [tokens, layers]) of states of that shape."""
    wide = states.float()
    scales = wide.abs().amax(-1) / _LARGEST
    # Of a state that is all zero, any scale will do.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def decode(numbers: Any, scales: Any) -> Any:
    """bf16 states of what `encode` gave."""
    return (numbers.float() * scales.unsqueeze(-1)).to(torch.bfloat16)


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
