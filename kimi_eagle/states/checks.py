"""Whether hidden states are what they claim to be. Imports torch."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch

# Why states are refused, as metrics count it and as `rows.txt` lists it (see `states.layout`).
OTHER_TOKENS = "other-tokens"
SHAPE = "shape"
NOT_FINITE = "not-finite"
ALL_ZERO = "all-zero"
REPEATED_LAYER = "repeated-layer"

# Looked at together: what both passes below read stays in a core's own cache.
_BLOCK_BYTES = 256 * 1024


class BadStates(ValueError):
    """States that must not be stored; the message says what is wrong with them."""

    def __init__(self, reason: str, message: str):
        """Args: `reason`: one of the constants of this module."""
        super().__init__(message)
        self.reason = reason


def check_states(states: Any, token_ids: Any, sent: Any, layers: int, hidden: int) -> None:
    """Refuse states that are not `[tokens, layers, hidden]` of the tokens that were sent.

    Args:
        states: tensor [tokens, layers, hidden] on the CPU. bfloat16 is looked through at the speed
            of memory; other types are looked at in another, slow way.
        token_ids: the ids that the engine says it ran, int [tokens].
        sent: the ids that were sent, int [tokens].

    Raises:
        BadStates: other ids (a server that prepends a BOS, another request's answer), another
            shape (states of a cached prefix left out, other layers, another width or order of
            axes), a number that is not finite, a state that is all zero, or two layers that are
            the same throughout.
    """
    check_tokens(token_ids, sent)
    expected = (len(sent), layers, hidden)
    if tuple(states.shape) != expected:
        raise BadStates(
            SHAPE,
            f"states have shape {list(states.shape)}; expected {list(expected)} "
            f"(tokens, layers, hidden){_shape_hint(tuple(states.shape), expected)}",
        )
    if states.dtype == torch.bfloat16:
        finite, zero, marks = _bits(states)
    else:
        finite = torch.isfinite(states).all(dim=-1).numpy()
        zero = (states == 0).all(dim=-1).numpy()
        marks = states[:, :, 0].numpy()
    if not finite.all():
        token, layer = (int(part) for part in np.argwhere(~finite)[0])
        raise BadStates(
            NOT_FINITE,
            f"the state of token {token} in layer slot {layer} holds a number that is not finite",
        )
    if zero.any():
        token, layer = (int(part) for part in np.argwhere(zero)[0])
        raise BadStates(
            ALL_ZERO, f"the state of token {token} in layer slot {layer} is all zero (degenerate)"
        )
    for one, other in combinations(range(layers), 2):
        # Marks that differ say that the states do; only where all agree are these compared whole.
        alike = np.array_equal(marks[:, one], marks[:, other])
        if alike and torch.equal(states[:, one], states[:, other]):
            raise BadStates(REPEATED_LAYER, f"layer slots {one} and {other} hold the same states")


def check_tokens(token_ids: Any, sent: Any) -> None:
    """Refuse the answer to other tokens than those that were sent; both int [tokens].

    Raises: BadStates, with the position where they first differ.
    """
    if token_ids.shape == sent.shape and bool((token_ids == sent).all()):
        return
    shared = min(len(token_ids), len(sent))
    differing = (token_ids[:shared] != sent[:shared]).nonzero()
    at = int(differing[0]) if len(differing) else shared
    hint = ""
    if len(token_ids) == len(sent) + 1 and bool((token_ids[1:] == sent).all()):
        hint = f"; the server put token {int(token_ids[0])} before them (a BOS): turn that off"
    raise BadStates(
        OTHER_TOKENS,
        f"the engine ran {len(token_ids)} tokens, {len(sent)} were sent: they differ at {at}{hint}",
    )


def _shape_hint(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What is likely to be behind another shape."""
    if found[1:] == expected[1:] and 0 < found[0] < expected[0]:
        return (
            f": {expected[0] - found[0]} tokens have no states, as when an engine takes a prefix "
            "from its cache; turn prefix caching off"
        )
    if sorted(found) == sorted(expected):
        return ": the axes are in another order"
    return ""


def _bits(states: Any) -> tuple[Any, Any, Any]:
    """What the bits of bfloat16 states [tokens, layers, hidden] say of each vector.

    Returns:
        Two bool [tokens, layers]: every number is finite; every number is zero. And int16
        [tokens, layers, 2]: marks, of which equal vectors have equal ones.

    A bfloat16 is not finite from 0x7f80 on, sign apart, and zero as 0x0000 and 0x8000. The largest
    as a signed integer speaks for the positive numbers of a vector, as an unsigned one for the
    negative.
    """
    numbers = states.view(torch.int16).numpy()
    tokens, layers, hidden = numbers.shape
    marks = np.empty((tokens, layers, 2), np.int16)
    step = max(1, _BLOCK_BYTES // max(1, layers * hidden * 2))
    for first in range(0, tokens, step):
        block = numbers[first : first + step]
        marks[first : first + step, :, 0] = block.max(-1)
        marks[first : first + step, :, 1] = block.view(np.uint16).max(-1).view(np.int16)
    signed, unsigned = marks[:, :, 0], marks[:, :, 1].view(np.uint16)
    finite = (signed < 0x7F80) & (unsigned < 0xFF80)
    zero = (signed <= 0) & ((unsigned == 0) | (unsigned == 0x8000))
    return finite, zero, marks
