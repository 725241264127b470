"""The gate: what an evaluation must show, whose it must be, and by how much it falls short."""

from __future__ import annotations

from typing import Any

import pytest
from cases import case_json

from kimi_eagle.stages.export.gate import belongs, gate
from kimi_eagle.stages.export.spec import Gate

GOOD = {
    "acceptance_length": 2.3,
    "draft_tokens": 3,
    "per_position": [0.7, 0.4, 0.2],
    "outputs_identical": True,
    "outputs_equal": 4,
    "prompts": 4,
    "simulated_gap": -0.03,
    "checkpoint": "c" * 64,
    "verifier": "d" * 64,
    "measurements": [
        {"set": "gsm8k", "acceptance_length": 2.5, "draft_tokens": 3},
        {"set": "mt_bench", "acceptance_length": 2.1, "draft_tokens": 3},
        {"set": "gsm8k", "acceptance_length": 1.9, "draft_tokens": 1},
    ],
}


def _said(changed: dict[str, Any], **needed: Any) -> list[str]:
    return [str(item) for item in gate({**GOOD, **changed}, Gate(**needed))]


def _lacking(changed: dict[str, Any], length: float = 1.0, first: float = 0.0) -> list[str]:
    return _said(
        changed, min_acceptance_length=length, min_first_position=first, outputs_identical=True
    )


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
    assert len(gate({"val_loss": 0.1}, Gate(outputs_identical=True))) == 3  # EVA-06


@pytest.mark.parametrize(("length", "first"), [(2.31, 0.0), (1.0, 0.71)])
def test_thresholds_are_held(length: float, first: float) -> None:
    assert len(_lacking({}, length, first)) == 1


@pytest.mark.parametrize("name", ["position collapse", "metric above one"])
def test_public_gate_vectors_fail(name: str) -> None:
    (vector,) = [item for item in case_json("eval/vectors.json") if item["name"] == name]
    shares = vector.get("per_position") or [vector["full_acc"], 0.4, 0.2]
    assert vector["gate"].startswith("fail")
    assert _lacking({"per_position": shares})


def test_a_shortfall_says_what_was_found_and_needed() -> None:
    (found,) = _said({"acceptance_length": 1.5}, min_acceptance_length=2.0)
    assert found == "acceptance length is 1.5, needed is at least 2.0 (0.5 short)"


def test_a_collapse_is_released_only_where_the_manifest_says_so() -> None:
    collapsed = {**GOOD, "per_position": [0.34, 0.0, 0.0]}
    assert gate(collapsed, Gate())
    assert gate(collapsed, Gate(refuse_collapse=False)) == []


@pytest.mark.parametrize("gap", [-0.051, 0.2, None, float("nan"), True])
def test_a_simulation_far_from_what_was_served_is_refused(gap: Any) -> None:
    (found,) = _said({"simulated_gap": gap}, max_simulated_gap=0.05)
    assert found.startswith("the gap between simulated and served acceptance length")


def test_a_simulation_near_what_was_served_passes() -> None:
    assert _said({}, max_simulated_gap=0.05) == []
    assert _said({"simulated_gap": None}) == []


def test_single_sets_have_thresholds_of_their_own() -> None:
    assert _said({}, min_of_sets={"gsm8k": 2.5, "mt_bench": 2.0}) == []
    (found,) = _said({}, min_of_sets={"gsm8k": 2.6, "mt_bench": 2.0})
    assert found == "acceptance length of gsm8k is 2.5, needed is at least 2.6 (0.1 short)"
    (found,) = _said({}, min_of_sets={"humaneval": 1.0})
    assert found.startswith("acceptance length of humaneval is None")


def test_agreement_is_a_share_of_the_outputs() -> None:
    some = {"outputs_equal": 3, "outputs_identical": False}
    assert _said(some, min_output_agreement=0.75) == []
    (found,) = _said(some, min_output_agreement=0.9)
    assert found.endswith("is 75.0%, needed is 90.0% (0.15 short)")


def test_agreement_in_batches_is_held_against_that_of_two_plain_runs() -> None:
    """8 of 20 outputs are equal with the draft, and 8 of 20 between two runs without it."""
    batched = {"outputs_equal": 8, "outputs_equal_without_draft": 8, "outputs_identical": None}
    assert _said(batched, min_output_agreement=1.0) == []
    assert _said({**batched, "outputs_equal": 6}, min_output_agreement=1.0)
    assert _said(batched, outputs_identical=True)


def test_a_draft_at_an_endpoint_counts_only_where_the_manifest_says_so() -> None:
    elsewhere = {"engine_kind": "endpoint"}
    (found,) = _said(elsewhere)
    assert found.startswith("what was measured is a draft at an endpoint")
    assert _said(elsewhere, served_elsewhere=True) == []
    assert _said({"engine_kind": "vllm"}) == []


def test_sampling_that_does_not_keep_the_distribution_is_refused() -> None:
    drawn = {"log_probability": -5.1, "log_probability_without_draft": -0.05}
    (found,) = _said({**drawn, "sampled_alike": False})
    assert found.startswith("the log-probability of sampled tokens is -5.1, needed is that without")
    assert _said({**drawn, "sampled_alike": True}) == []


@pytest.mark.parametrize("changed", [{}, {"outputs_equal": None}, {"prompts": 0}])
def test_agreement_that_was_not_measured_is_refused(changed: dict[str, Any]) -> None:
    held = {**GOOD, **changed}
    if not changed:
        del held["outputs_equal"]
    assert gate(held, Gate(min_output_agreement=0.5))


def test_the_evaluation_must_be_of_this_checkpoint_and_verifier() -> None:
    assert belongs(GOOD, "c" * 64, "d" * 64) == []
    (found,) = belongs(GOOD, "e" * 64, "d" * 64)
    assert str(found) == f"the checkpoint that was evaluated is {'c' * 64}, needed is {'e' * 64}"
    (found,) = belongs(GOOD, "c" * 64, "e" * 64)
    assert found.what == "the verifier that was evaluated"
    assert len(belongs({}, "c" * 64, "d" * 64)) == 2  # made before it was written down
