"""Which conversations of several sources a mixture takes. Pure.

A conversation's rank is a digest of the seed and of what it says, and a source that gives fewer
than it has gives those of lowest rank: neither the order of records nor that of files matters, and
a larger limit takes all that a smaller one took.

Weights are shares of the mixture in conversations. The source that has fewest for its weight gives
all of them, and the others as many as keep the proportions, rounded down: nothing is taken twice.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from fractions import Fraction

from kimi_eagle.identity import digest_document


def take_counts(
    sizes: Sequence[int], limits: Sequence[int | None], weights: Sequence[float | None]
) -> list[int]:
    """How many conversations each source gives.

    Args:
        sizes: of each source, how many it has.
        limits: of each, how many it gives at most.
        weights: of each its share of the mixture; of all sources or of none.
    """
    given = [
        size if limit is None else min(size, limit)
        for size, limit in zip(sizes, limits, strict=True)
    ]
    # As decimals: 0.1 is a tenth, and not what binary makes of it.
    shares = [Fraction(repr(weight)) for weight in weights if weight is not None]
    if not shares:
        return given
    assert len(shares) == len(given), "either every source has a weight or none"
    scale = min(Fraction(count) / share for count, share in zip(given, shares, strict=True))
    return [int(scale * share) for share in shares]


def lowest(digests: Sequence[bytes], count: int, seed: int) -> Container[int]:
    """The positions of the `count` conversations of lowest rank.

    Args:
        digests: of each conversation, in the order of the source; equal ones count apart.
    """
    if count >= len(digests):
        return range(len(digests))
    ranked = sorted(
        range(len(digests)),
        key=lambda at: (digest_document("sample/1", [seed, digests[at].hex()]), at),
    )
    return set(ranked[:count])
