"""Acceptance length: what counts, what it is called, and what the gate refuses."""

from __future__ import annotations

from typing import Any

import pytest
from cases import case_json
from hypothesis import given
from hypothesis import strategies as st

from kimi_eagle.stages.evaluate.acceptance import (
    accepted_prefix,
    committed,
    expected_accepted,
    gate,
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


GOOD = {
    "acceptance_length": 2.3,
    "draft_tokens": 3,
    "per_position": [0.7, 0.4, 0.2],
    "outputs_identical": True,
    "outputs_equal": 4,
    "prompts": 4,
}


def _lacking(changed: dict[str, Any], length: float = 1.0, first: float = 0.0) -> list[str]:
    return [item.what for item in gate({**GOOD, **changed}, length, first, True)]


def test_a_good_evaluation_passes() -> None:
    assert _lacking({}, 2.3, 0.7) == []


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"per_position": [0.34, 0.0, 0.0]}, id="EVA-06 collapse"),
        pytest.param({"per_position": [0.34, 0.004, 0.0]}, id="EVA-06 collapse but for noise"),
        pytest.param({"per_position": [0.0, 0.0, 0.0]}, id="never accepted"),
        pytest.param({"per_position": [1.42, 0.4, 0.2]}, id="share above one"),
        pytest.param({"per_position": [0.7, -0.1, 0.0]}, id="share below zero"),
        pytest.param({"per_position": [0.4, 0.7, 0.2]}, id="EVA-01 rising shares"),
        pytest.param({"per_position": [float("nan"), 0.0, 0.0]}, id="not a number"),
        pytest.param({"per_position": [True, 0.4, 0.2]}, id="truth for a share"),
        pytest.param({"per_position": ["0.7", 0.4, 0.2]}, id="text for a share"),
        pytest.param({"per_position": []}, id="no share"),
        pytest.param({"per_position": None}, id="null"),
        pytest.param({"per_position": [0.7, 0.4]}, id="fewer shares than draft tokens"),
        pytest.param({"acceptance_length": None}, id="EVA-08 no draft step"),
        pytest.param({"acceptance_length": float("nan")}, id="length not a number"),
        pytest.param({"acceptance_length": 0.9}, id="length below one"),
        pytest.param({"acceptance_length": 4.1}, id="length above the most possible"),
        pytest.param({"acceptance_length": True}, id="truth for a length"),
        pytest.param({"outputs_identical": False}, id="other outputs"),
        pytest.param({"outputs_identical": None}, id="outputs not compared"),
    ],
)
def test_what_never_passes_whatever_is_asked(changed: dict[str, Any]) -> None:
    assert len(_lacking(changed)) == 1


def test_every_missing_figure_is_named() -> None:
    assert len(gate({"val_loss": 0.1}, 1.0, 0.0, True)) == 3  # EVA-06


@pytest.mark.parametrize(("length", "first"), [(2.31, 0.0), (1.0, 0.71)])
def test_thresholds_are_held(length: float, first: float) -> None:
    assert len(_lacking({}, length, first)) == 1


@pytest.mark.parametrize("name", ["position collapse", "metric above one"])
def test_public_gate_vectors_fail(name: str) -> None:
    vector = _vector(name)
    shares = vector.get("per_position") or [vector["full_acc"], 0.4, 0.2]
    assert vector["gate"].startswith("fail")
    assert _lacking({"per_position": shares})


def test_a_shortfall_says_what_was_found_and_needed() -> None:
    (found,) = gate({**GOOD, "acceptance_length": 1.5}, 2.0, 0.0, True)
    assert str(found) == "acceptance length is 1.5, needed is at least 2.0"


def test_a_collapse_is_released_only_where_the_manifest_says_so() -> None:
    collapsed = {**GOOD, "per_position": [0.34, 0.0, 0.0]}
    assert gate(collapsed, 1.0, 0.0, False)
    assert gate(collapsed, 1.0, 0.0, False, refuse_collapse=False) == []
