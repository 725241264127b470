"""Which rows make which batch: every row once an epoch, in an order of its own, packed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_eagle.draft.packing import Item, order, pack, steps_of

ITEMS = [Item(f"{n:064x}", 5 + n * 7 % 40, (n % 5 + 1, n % 4, n % 3)) for n in range(200)]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=120),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 4),
)
def test_every_row_is_in_one_batch_of_an_epoch(
    positions: list[int], accumulate: int, seed: int, epoch: int
) -> None:  # TRN-11
    items = [Item(f"{n}", size, (1, 0)) for n, size in enumerate(positions)]
    steps = steps_of(items, 64, accumulate, seed, epoch)
    batches = [batch for step in steps for batch in step.batches]
    assert sorted(number for batch in batches for number in batch) == list(range(len(items)))
    assert all(0 < sum(items[n].positions for n in batch) <= 64 for batch in batches)
    assert all(len(step.batches) == accumulate for step in steps[:-1])
    assert sum(step.supervised[0] for step in steps) == len(items)


def test_the_order_is_of_seed_epoch_and_rows_alone() -> None:
    first = order(ITEMS, 0, 0)
    assert first == order(ITEMS, 0, 0)
    assert first != order(ITEMS, 0, 1) != order(ITEMS, 1, 0)
    # A row that is added changes nothing of the order of the others, wherever it is listed.
    more = [Item("f" * 64, 9, (1, 1, 1)), *ITEMS]
    assert [n - 1 for n in order(more, 0, 0) if n > 0] == first


def test_the_order_is_the_same_everywhere() -> None:
    assert order(ITEMS, 0, 0)[:8] == [8, 102, 47, 99, 113, 58, 5, 24]


def test_batches_are_filled() -> None:
    """Rows of 5 to 44 positions in batches of 256."""
    batches = pack(ITEMS, 256, order(ITEMS, 0, 0))
    used = sum(item.positions for item in ITEMS)
    assert used / (256 * len(batches)) > 0.95


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 40 positions of 39"):
        pack([Item("a", 40, (1,))], 39, [0])
