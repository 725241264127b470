"""Walk a row as serving walks an answer, and count what each draft step commits. Pure.

A step begins at the last token that is known and proposes a chain. The verifier accepts what
equals its own next token and adds one of its own, the bonus; the next step begins there. Where the
row holds another token than the verifier's own (a row that was not made by it, or a near tie), what
lies behind is no longer the verifier's path: the step is *left off* there, and what it would have
committed is reckoned from the steps that were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Steps:
    """Draft steps over many rows."""

    draft_tokens: int
    committed: list[list[int]] = field(default_factory=list)
    """Of each answer, tokens committed by each of its steps that could be followed to its end."""
    left_off: list[int] = field(default_factory=list)
    """Accepted tokens of the steps that could not."""
    tried: list[int] = field(default_factory=list)
    """How often the draft token at each place in the chain was held against the verifier's."""
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tried = self.tried or [0] * self.draft_tokens
        self.accepted = self.accepted or [0] * self.draft_tokens

    @property
    def rates(self) -> list[float | None]:
        """Share of draft tokens accepted at each place, of those whose chain was right so far."""
        return [
            good / tried if tried else None
            for good, tried in zip(self.accepted, self.tried, strict=True)
        ]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per step, pooled, the bonus included; None without a step.

        A step that was left off after a accepted tokens counts a + 1 and what the rates promise
        beyond: Σ over p ≥ a of the product of rates a..p.
        """
        total: float = sum(sum(answer) for answer in self.committed)
        steps = sum(len(answer) for answer in self.committed) + len(self.left_off)
        rates = self.rates
        for accepted in self.left_off:
            together, total = 1.0, total + accepted + 1
            for rate in rates[accepted:]:
                together *= rate or 0.0
                total += together
        return total / steps if steps else None

    @property
    def count(self) -> int:
        return sum(len(answer) for answer in self.committed) + len(self.left_off)


def walk(
    steps: Steps,
    tokens: Sequence[int],
    answer: tuple[int, int],
    chains: Any,
    verifier: Sequence[int],
) -> None:
    """Walk one answer of a row and add its draft steps.

    Args:
        tokens: the row's ids.
        answer: the half-open range of the tokens that the verifier emits; the first of them comes
            with the prompt and belongs to no draft step.
        chains: `chains[c]` is what the draft proposes after token c, draft_tokens ids.
        verifier: `verifier[c]` is the verifier's own next token after token c.
    """
    first, end = answer
    at, found = first, []
    while at + 1 < end:
        accepted, off = 0, False
        for place in range(min(steps.draft_tokens, end - 1 - at)):
            own = verifier[at + place]
            right = chains[at][place] == own
            steps.tried[place] += 1
            steps.accepted[place] += right
            accepted += right
            off = right and own != tokens[at + place + 1]
            if not right or off:
                break
        if off:
            steps.left_off.append(accepted)
            at += accepted
            continue
        # The bonus token is there unless the answer ended with the accepted ones.
        taken = min(accepted + 1, end - 1 - at)
        found.append(taken)
        at += taken
    steps.committed.append(found)


def answers(mask: Sequence[int], limit: int | None = None) -> list[tuple[int, int]]:
    """The ranges of a row that the verifier emitted (mask 1), each at most `limit` tokens long;
    one that opens the row has no prompt and is left out."""
    edges = [0, *(int(value) for value in mask), 0]
    begun = [at for at, (a, b) in enumerate(pairwise(edges)) if (a, b) == (0, 1)]
    ended = [at for at, (a, b) in enumerate(pairwise(edges)) if (a, b) == (1, 0)]
    found = []
    for start, end in zip(begun, ended, strict=True):
        if start > 0:
            found.append((start, end if limit is None else min(end, start + limit)))
    return found
