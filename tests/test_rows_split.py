"""Which conversations validate: counts in decimals, membership by content and seed alone."""

from __future__ import annotations

import pytest
from cases import case_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_eagle.identity import digest_document
from kimi_eagle.rows.split import train_count, validating

NAMES = [f"conversation {number}" for number in range(50)]


@pytest.mark.parametrize(
    ("total", "val_ratio", "train"),
    [
        (10, 0.2, 8),
        (10, 0.9, 1),  # 10 × (1 - 0.9) is 0.9999999999999998 in binary
        (100, 0.71, 29),  # 100 × 0.29 is 28.999999999999996 in binary
        (12501, 0.8, 2500),
        (3, 0.1, 2),
        (1, 0.1, 0),
        (10, 0.0, 10),
        (0, 0.5, 0),
    ],
)
def test_the_share_is_reckoned_in_decimals_and_rounded_down(
    total: int, val_ratio: float, train: int
) -> None:
    assert train_count(total, val_ratio) == train


def test_public_vector_of_an_uneven_count() -> None:
    vector = case_json("masks/vectors.json")["split"][0]
    train = train_count(vector["n"], round(1 - vector["train_ratio"], 6))
    assert (train, vector["n"] - train) == (vector["train"], vector["val"])


@given(st.integers(2, 10_000), st.decimals("0.001", "0.999", places=3))
def test_a_positive_share_keeps_at_least_one_apart(total: int, share: object) -> None:
    assert 0 <= train_count(total, float(str(share))) < total


def test_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match=r"val_ratio 0\.1 of 1 conversations leaves none"):
        validating(NAMES[:1], 0.1, 0)


def test_order_and_repetition_do_not_matter() -> None:
    known = validating(NAMES, 0.2, 0)
    assert len(known) == 10
    assert validating([*reversed(NAMES), *NAMES[:7]], 0.2, 0) == known


def test_the_seed_decides() -> None:
    assert validating(NAMES, 0.2, 0) != validating(NAMES, 0.2, 1)


def test_a_smaller_share_is_part_of_a_larger_one() -> None:
    assert validating(NAMES, 0.1, 0) < validating(NAMES, 0.3, 0)


def test_no_share_keeps_nothing_apart() -> None:
    assert validating(NAMES, 0.0, 0) == set()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(2, 40),
    st.integers(0, 40),
    st.sampled_from([0.05, 0.1, 0.25, 0.5]),
    st.integers(0, 5),
)
def test_appending_moves_no_more_than_the_exact_count_demands(
    old: int, new: int, val_ratio: float, seed: int
) -> None:
    names = [f"conversation {number}" for number in range(old + new)]
    if train_count(old, val_ratio) == 0:
        return
    before, after = (validating(names[:size], val_ratio, seed) for size in (old, old + new))
    out, into = before - after, (after & set(names[:old])) - before
    assert not (out and into), "all that move go one way"
    # With the cut where it was, the count would be wrong by this much.
    ranked = sorted(names, key=lambda item: digest_document("split/1", [seed, item]))
    cut = max(ranked.index(item) for item in before)
    wrong = sum(item in names[old:] for item in ranked[:cut]) - (len(after) - len(before))
    assert len(out) <= max(0, wrong)
    assert len(into) <= max(0, -wrong)


def test_removing_one_conversation_moves_at_most_one() -> None:
    before = validating(NAMES, 0.2, 0)
    for name in NAMES:
        after = validating([other for other in NAMES if other != name], 0.2, 0)
        assert len((before ^ after) - {name}) <= 1
