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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

# A draft that is right about its second token less often than this, of the times it was right
# about its first, is fed other states than it was trained on; poor drafts reach several times it.
COLLAPSE = 0.05


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
    )


@dataclass(frozen=True)
class Shortfall:
    """One thing that an evaluation lacks for a release."""

    what: str
    found: object
    needed: object

    def __str__(self) -> str:
        return f"{self.what} is {self.found}, needed is {self.needed}"


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shares(value: object) -> list[float] | None:
    """Shares within 0 and 1, none above the one before it; None for anything else."""
    if not isinstance(value, list | tuple) or not all(map(_number, value)):
        return None
    shares = [1.0, *map(float, value)]
    falling = all(0 <= after <= before for before, after in pairwise(shares))
    return shares[1:] if falling else None


def gate(
    evaluation: dict[str, object],
    min_acceptance_length: float,
    min_first_position: float,
    outputs_identical: bool,
    refuse_collapse: bool = True,
) -> list[Shortfall]:
    """What an evaluation lacks; empty when it may be released.

    Shares that are missing, outside 0..1 or rising and lengths outside 1..k+1 are measuring errors
    and never pass; with `refuse_collapse` nor does a draft that never helps, or is right once and
    then never again.
    """
    lacking = []
    length = evaluation.get("acceptance_length")
    limit = evaluation.get("draft_tokens")
    positions = _shares(evaluation.get("per_position"))
    if not _number(length) or type(limit) is not int:
        lacking.append(Shortfall("acceptance length", length, f"at least {min_acceptance_length}"))
    elif not 1 <= length <= limit + 1:
        lacking.append(Shortfall("acceptance length", length, f"within 1 and {limit + 1}"))
    elif length < min_acceptance_length:
        lacking.append(
            Shortfall("acceptance length", round(length, 4), f"at least {min_acceptance_length}")
        )
    if positions is None or len(positions) != limit:
        lacking.append(
            Shortfall(
                "acceptance per position",
                evaluation.get("per_position"),
                f"{limit} shares within 0 and 1, none above the one before",
            )
        )
    elif positions[0] < min_first_position:
        lacking.append(
            Shortfall(
                "acceptance at the first position",
                round(positions[0], 4),
                f"at least {min_first_position}",
            )
        )
    elif refuse_collapse and positions[0] == 0:
        lacking.append(
            Shortfall("acceptance at the first position", 0.0, "some: the draft never helps")
        )
    elif refuse_collapse and len(positions) > 1 and positions[1] < COLLAPSE * positions[0]:
        lacking.append(
            Shortfall(
                "acceptance past the first position",
                positions,
                f"at least {COLLAPSE:.0%} of the one before: so little means that the draft and "
                "the engine disagree on its states",
            )
        )
    if outputs_identical and evaluation.get("outputs_identical") is not True:
        lacking.append(
            Shortfall(
                "agreement with decoding without the draft",
                f"{evaluation.get('outputs_equal')} of {evaluation.get('prompts')} outputs",
                "all of them",
            )
        )
    return lacking
