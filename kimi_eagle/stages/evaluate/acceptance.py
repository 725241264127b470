"""Acceptance length, defined once. Pure.

One *draft step* is one forward pass of the verifier that checks draft tokens; it commits the
accepted ones and one token of the verifier's own, the bonus. The token that prefill gives belongs
to no draft step.

- **acceptance length** (pooled): tokens committed by draft steps ÷ draft steps, over all requests
  together; the bonus token is included, so 1.0 is a draft that never helps and k + 1 the most that
  k draft tokens can give. Tokens past the end of the turn or past the token limit are not
  committed and do not count, nor does anything after the first rejection.
- **acceptance length per request**: the mean over requests of each one's own; it weighs short
  requests as much as long ones and can rank drafts differently, so it has another name.
- **acceptance at position p** (from 0): share of the draft steps in which draft token p was
  accepted, and with it every token before. The last step of a request is left out: the end of the
  turn or the token limit may have cut what it would have committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def accepted_prefix(matches: Sequence[bool]) -> int:
    """How many draft tokens a step accepts: those before the first that does not match."""
    for position, match in enumerate(matches):
        if not match:
            return position
    return len(matches)


def committed(tokens: Sequence[object], end: object) -> int:
    """How many of a step's tokens are committed: up to the end of the turn, that included."""
    for position, token in enumerate(tokens):
        if token == end:
            return position + 1
    return len(tokens)


def expected_accepted(accuracies: Sequence[float]) -> float:
    """Expected accepted draft tokens when position p matches with probability accuracies[p] given
    that all before it did: Σ_p Π_{q ≤ p} accuracies[q]."""
    total, together = 0.0, 1.0
    for accuracy in accuracies:
        together *= accuracy
        total += together
    return total


@dataclass(frozen=True)
class Acceptance:
    """Figures over a set of requests; None where no draft step was made, with `reason`."""

    acceptance_length: float | None
    acceptance_length_per_request: float | None
    per_position: tuple[float, ...]
    draft_steps: int
    reason: str | None = None
    standard_error: float | None = None
    """Of the pooled length, over requests: √(n/(n-1) · Σ (tokens - length · steps)²) ÷ steps in
    all, the usual one of a ratio; None for fewer than two requests."""


def pool(requests: Sequence[Sequence[int]], draft_tokens: int) -> Acceptance:
    """Pool the draft steps of requests.

    Args:
        requests: for each request the tokens that each of its draft steps committed (1 to
            draft_tokens + 1).

    Raises:
        ValueError: a step that committed fewer or more: a counter that counts something else.
    """
    steps = [count for request in requests for count in request]
    wrong = [count for count in steps if not 1 <= count <= draft_tokens + 1]
    if wrong:
        raise ValueError(
            f"a draft step committed {wrong[0]} tokens; with {draft_tokens} draft tokens it "
            f"commits 1 to {draft_tokens + 1}"
        )
    if not steps:
        return Acceptance(None, None, (), 0, "no draft step was made: every answer ended at once")
    whole = [count for request in requests for count in request[:-1]]
    own = [sum(request) / len(request) for request in requests if request]
    return Acceptance(
        sum(steps) / len(steps),
        sum(own) / len(own),
        tuple(
            sum(count > position + 1 for count in whole) / len(whole)
            for position in range(draft_tokens if whole else 0)
        ),
        len(steps),
        standard_error=standard_error(
            [sum(request) for request in requests if request],
            [len(request) for request in requests if request],
        ),
    )


def standard_error(amounts: Sequence[float], counts: Sequence[int]) -> float | None:
    """Of Σ amounts ÷ Σ counts over requests, see `Acceptance.standard_error`."""
    number, whole = len(counts), sum(counts)
    if number < 2 or not whole:
        return None
    ratio = sum(amounts) / whole
    pairs = zip(amounts, counts, strict=True)
    apart = sum((amount - ratio * count) ** 2 for amount, count in pairs)
    return math.sqrt(number / (number - 1) * apart) / whole
