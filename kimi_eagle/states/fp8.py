"""Hidden states as fp8, and back. Imports torch.

A state (one token's, of one layer) is its numbers divided by a scale, as e4m3: 1 sign, 4 exponent
and 3 mantissa bits, largest number 448 (Micikevicius et al. 2022). The scale is fp32 and brings the
state's largest number to 448: a token whose states are a thousand times the others' (verifiers have
such, the first of a row above all) leaves theirs alone.
"""

from __future__ import annotations

from typing import Any

import torch

_LARGEST = 448.0


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
