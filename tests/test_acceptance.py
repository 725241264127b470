"""Acceptance length: what counts, and what it is called."""

from __future__ import annotations

import math
from typing import Any

import pytest
from cases import case_json
from hypothesis import given
from hypothesis import strategies as st

from kimi_eagle.stages.evaluate.acceptance import (
    accepted_prefix,
    committed,
    expected_accepted,
    pool,
)


def _vector(name: str) -> dict[str, Any]:
    (found,) = [item for item in case_json("eval/vectors.json") if item["name"] == name]
    return dict(found)


@pytest.mark.parametrize(
    ("matches", "accepted"),
    [
        ([True, False, True, True], 1),
        ([False, True, True], 0),
        ([True, True, True], 3),
        ([], 0),
    ],
)
def test_nothing_past_the_first_rejection_counts(matches: list[bool], accepted: int) -> None:
    assert accepted_prefix(matches) == accepted  # EVA-01


def test_public_prefix_rule() -> None:  # EVA-01
    vector = _vector("prefix rule")
    assert accepted_prefix(vector["match"]) == vector["accepted"]


def test_the_bonus_token_is_included() -> None:
    vector = _vector("bonus included")
    steps = [accepted + 1 for accepted in vector["accepted_per_step"]]
    assert pool([steps], 3).acceptance_length == pytest.approx(vector["mean_acceptance_length"])


def test_tokens_past_the_end_of_the_turn_are_not_committed() -> None:
    vector = _vector("EOS inside prefix")
    assert committed(vector["verified"], "EOS") == vector["committed"]
    assert committed(["EOS", "EOS"], "EOS") == 1
    assert committed(["a", "b"], "EOS") == 2


def test_pooled_and_per_request_means_have_two_names() -> None:  # EVA-04
    vector = _vector("global vs per-request")
    long, short = vector["requests"]
    steps = [long["committed"] // long["steps"]] * long["steps"]
    found = pool([steps, [short["committed"]]], 3)
    assert found.acceptance_length == pytest.approx(vector["global"])
    assert found.acceptance_length_per_request == pytest.approx(vector["per_request_mean"])
    assert found.draft_steps == 11


def test_requests_without_a_draft_step_weigh_nothing() -> None:
    assert pool([[2, 2], []], 3) == pool([[2, 2]], 3)


def test_expected_accepted_length() -> None:  # EVA-05
    vector = _vector("expected accepted length")
    assert expected_accepted(vector["acc"]) == pytest.approx(vector["eal"])
    assert expected_accepted([0.0, 1.0]) == 0.0
    assert expected_accepted([]) == 0.0


@pytest.mark.parametrize("requests", [[], [[]], [[], []]])
def test_no_draft_step_is_null_with_a_reason(requests: list[list[int]]) -> None:  # EVA-08
    found = pool(requests, 3)
    assert (found.acceptance_length, found.acceptance_length_per_request) == (None, None)
    assert found.reason
    assert found.draft_steps == _vector("no draft steps")["steps"] == 0


@pytest.mark.parametrize("count", [0, -1, 5])
def test_counts_that_no_step_can_commit_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"committed {count} tokens"):
        pool([[1, count]], 3)


def test_positions_are_of_steps_that_nothing_cut_short() -> None:
    """The last step of a request may have been ended by the turn or the limit."""
    assert pool([[4, 2, 1]], 3).per_position == (1.0, 0.5, 0.5)


@given(st.lists(st.lists(st.integers(1, 4), max_size=6), max_size=5))
def test_figures_stay_within_their_ranges(requests: list[list[int]]) -> None:
    found = pool(requests, 3)
    if found.acceptance_length is not None:
        assert 1 <= found.acceptance_length <= 4
    assert list(found.per_position) == sorted(found.per_position, reverse=True)
    assert all(0 <= share <= 1 for share in found.per_position)


def test_the_standard_error_is_that_of_a_ratio() -> None:
    """Two requests of 2 steps each, 3 and 5 tokens: length 2, residuals -1 and 1."""
    found = pool([[1, 2], [2, 3]], 3)
    assert found.acceptance_length == 2.0
    assert found.standard_error == pytest.approx(math.sqrt(2 / 1 * 2) / 4)
    assert pool([[1, 2]], 3).standard_error is None
