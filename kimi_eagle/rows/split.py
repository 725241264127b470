"""Which conversations validate. Pure.

Every conversation has a rank, which depends on what it says and on the seed alone; of n that
differ, the `n - floor(n × (1 - val_ratio))` of lowest rank validate. So equal conversations are on
one side, the count is exact, and order, files and neighbours do not matter.

When conversations are appended, each new one brings its own rank, and the cut moves to where the
count is exact again. An old conversation changes sides only if the cut passes it; all that do
change in one direction, and they are at most as many as the count would be wrong by with the cut
where it was. No rule that leaves order out of account can promise that none moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Decimal

from kimi_eagle.identity import digest_document


def train_count(total: int, val_ratio: float) -> int:
    """How many of `total` conversations train: total × (1 - val_ratio) rounded down, reckoned in
    decimals (10 × (1 - 0.9) is 1, not 0)."""
    share = Decimal(1) - Decimal(repr(val_ratio))
    return int((Decimal(total) * share).to_integral_value(ROUND_FLOOR))


def validating(conversations: Sequence[str], val_ratio: float, seed: int) -> set[str]:
    """The conversations, by digest, that are kept apart: those of lowest rank, where the rank of
    one depends on nothing but itself and the seed, so that order and neighbours do not matter.

    Raises:
        ValueError: the split would leave nothing to train on.
    """
    unique = sorted(set(conversations), key=lambda item: digest_document("split/1", [seed, item]))
    train = train_count(len(unique), val_ratio)
    if unique and train == 0:
        raise ValueError(
            f"val_ratio {val_ratio} of {len(unique)} conversations leaves none to train on"
        )
    return set(unique[: len(unique) - train])
