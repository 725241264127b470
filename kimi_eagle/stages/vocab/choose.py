"""Choose a draft vocabulary. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """The verifier's token ids that the draft knows, ascending."""

    selected: tuple[int, ...]
    filled: int
    """How many of them were never seen, taken to reach the size."""
    forced: int
    """How many of them are there because they had to be included, and would not be by count."""
    covered: int
    """Occurrences of supervised tokens that are selected."""
    total: int

    @property
    def offsets(self) -> list[int]:
        """d2t as speculators and vLLM read it: draft id i stands for verifier id i + d2t[i]."""
        return [token - index for index, token in enumerate(self.selected)]


def rank(counts: Mapping[int, int], real: int, include: Iterable[int] = ()) -> list[int]:
    """The ids below `real` in the order in which they are taken: what must be included, then by
    count, the most frequent first, then by id."""
    first = set(include)
    return sorted(range(real), key=lambda token: (token not in first, -counts.get(token, 0), token))


def choose(
    counts: Mapping[int, int], size: int, vocab_size: int, real: int, include: Sequence[int] = ()
) -> Choice:
    """The `size` most frequent tokens; ties go to the lower id, and so do the places that remain
    when every token seen is in.

    Args:
        counts: occurrences by token id, over the supervised tokens of training rows.
        vocab_size: of the verifier's config, padding included.
        real: ids from here on are padding of the embedding, and never taken.
        include: ids that are taken whatever their count.

    Raises:
        ValueError: an id outside the vocabulary, no supervised token, or too large a size; more
            to include than the size has places.
    """
    outside = [token for token in counts if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token id {min(outside)} outside verifier vocab {vocab_size}")
    if size > vocab_size:
        raise ValueError(f"draft vocab {size} larger than verifier vocab {vocab_size}")
    if size > real:
        raise ValueError(
            f"draft vocab {size} larger than the {real} tokens of the tokenizer: the ids up to "
            f"the verifier vocab {vocab_size} are padding; `size: full` takes it whole"
        )
    seen = {token: count for token, count in counts.items() if count > 0}
    if not seen:
        raise ValueError("no supervised tokens")
    forced = sorted(set(include))
    padding = [token for token in forced if not 0 <= token < real]
    if padding:
        raise ValueError(f"token id {padding[0]} is not one of the {real} of the tokenizer")
    if len(forced) > size:
        raise ValueError(f"{len(forced)} tokens to include do not fit a draft vocab of {size}")
    selected = sorted(rank(seen, real, forced)[:size])
    by_count = set(rank(seen, real)[:size])
    covered = [seen[token] for token in selected if token in seen]
    return Choice(
        tuple(selected),
        size - len(covered),
        sum(token not in by_count for token in forced),
        sum(covered),
        sum(seen.values()),
    )


def coverage(counts: Mapping[int, int], selected: set[int]) -> float | None:
    """The share of occurrences that are of selected tokens; None where there are none."""
    total = sum(counts.values())
    if not total:
        return None
    return sum(count for token, count in counts.items() if token in selected) / total


def curve(
    counts: Mapping[int, int], apart: Mapping[int, int], order: Sequence[int], sizes: Iterable[int]
) -> list[dict[str, float | int | None]]:
    """Coverage against size: of training rows (`counts`) and of those kept apart (`apart`), were
    the vocabulary the first so many of `order`."""
    points: list[dict[str, float | int | None]] = []
    totals = [sum(counts.values()), sum(apart.values())]
    sums, taken = [0, 0], 0
    for size in sorted(set(sizes)):
        for token in order[taken:size]:
            sums[0] += counts.get(token, 0)
            sums[1] += apart.get(token, 0)
        taken = size
        shares = [part / total if total else None for part, total in zip(sums, totals, strict=True)]
        points.append({"size": size, "coverage": shares[0], "coverage_val": shares[1]})
    return points


def curve_sizes(real: int, chosen: int) -> list[int]:
    """Powers of two from 64 on, all there is, and the size chosen."""
    powers = [1 << power for power in range(6, real.bit_length()) if 1 << power < real]
    return sorted({*powers, real, min(chosen, real)})
