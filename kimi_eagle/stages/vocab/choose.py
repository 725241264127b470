"""Choose a draft vocabulary. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """The verifier's token ids that the draft knows, ascending."""

    selected: tuple[int, ...]
    filled: int
    """How many of them were never seen, taken to reach the size."""
    covered: int
    """Occurrences of supervised tokens that are selected."""
    total: int

    @property
    def offsets(self) -> list[int]:
        """d2t as speculators and vLLM read it: draft id i stands for verifier id i + d2t[i]."""
        return [token - index for index, token in enumerate(self.selected)]


def choose(counts: Mapping[int, int], size: int, vocab_size: int, real: int) -> Choice:
    """The `size` most frequent tokens; ties go to the lower id, and so do the places that remain
    when every token seen is in.

    Args:
        counts: occurrences by token id, over the supervised tokens of training rows.
        vocab_size: of the verifier's config, padding included.
        real: ids from here on are padding: taken only when no real id remains.

    Raises:
        ValueError: an id outside the vocabulary, no supervised token, or too large a size.
    """
    outside = [token for token in counts if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token id {min(outside)} outside verifier vocab {vocab_size}")
    if size > vocab_size:
        raise ValueError(f"draft vocab {size} larger than verifier vocab {vocab_size}")
    seen = {token: count for token, count in counts.items() if count > 0}
    if not seen:
        raise ValueError("no supervised tokens")
    ranked = sorted(
        range(vocab_size), key=lambda token: (token >= real, -seen.get(token, 0), token)
    )
    selected = sorted(ranked[:size])
    covered = [seen[token] for token in selected if token in seen]
    return Choice(tuple(selected), size - len(covered), sum(covered), sum(seen.values()))
