"""Whether hidden states are what they claim to be. Imports torch."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch


class BadStates(ValueError):
    """States that must not be stored; the message says what is wrong with them."""


def check_states(states: Any, token_ids: Any, sent: Any, layers: int, hidden: int) -> None:
    """Refuse states that are not `[tokens, layers, hidden]` of the tokens that were sent.

    Args:
        states: tensor [tokens, layers, hidden].
        token_ids: the ids that the engine says it ran, int [tokens].
        sent: the ids that were sent, int [tokens].

    Raises:
        BadStates: other ids (a server that prepends a BOS, another request's answer), another
            shape, a number that is not finite, a state that is all zero, or two layers that are
            the same throughout.
    """
    if token_ids.shape != sent.shape or not bool((token_ids == sent).all()):
        shared = min(len(token_ids), len(sent))
        differing = (token_ids[:shared] != sent[:shared]).nonzero()
        at = int(differing[0]) if len(differing) else shared
        raise BadStates(
            f"the engine ran {len(token_ids)} tokens, {len(sent)} were sent: they differ at {at}"
        )
    expected = (len(sent), layers, hidden)
    if tuple(states.shape) != expected:
        raise BadStates(
            f"states have shape {list(states.shape)}; expected {list(expected)} "
            "(tokens, layers, hidden)"
        )
    if not bool(torch.isfinite(states).all()):
        raise BadStates("states hold numbers that are not finite")
    zero = (states == 0).all(dim=-1)
    if bool(zero.any()):
        token, layer = (int(part) for part in zero.nonzero()[0])
        raise BadStates(
            f"the state of token {token} in layer slot {layer} is all zero (degenerate)"
        )
    for one, other in combinations(range(layers), 2):
        if torch.equal(states[:, one], states[:, other]):
            raise BadStates(f"layer slots {one} and {other} hold the same states")
