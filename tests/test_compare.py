"""`compare`: evaluations side by side, beside what is published, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Project

from kimi_eagle import render
from kimi_eagle.acceptance_table import Evaluation, Table
from kimi_eagle.published import published


def _measured(name: str, length: float | None, **changed: Any) -> dict[str, Any]:
    return {
        "set": name,
        "draft_tokens": 3,
        "temperature": 0.0,
        "batch": 1,
        "prompts": 80,
        "acceptance_length": length,
        "acceptance_length_reason": None if length else "no draft step was made",
        "acceptance_length_per_request": length,
        "standard_error": 0.05,
        "per_position": [0.7, 0.4, 0.2],
        "draft_steps": 100,
        "outputs_equal": 80,
        **changed,
    }


def _evaluation(name: str, *measured: dict[str, Any], **document: Any) -> Evaluation:
    whole = {
        "measurements": list(measured),
        "verifier": "v",
        "sets": {one["set"]: ["p"] for one in measured},
        "max_tokens": 128,
        "thinking": "default",
        "outputs_identical": True,
        **document,
    }
    speeds = [{**one, "speedup": 1.5} for one in measured if one["set"] == "mt_bench"]
    return Evaluation(name, name * 8, whole, speeds)


ONE = _evaluation("one", _measured("mt_bench", 2.4), _measured("chat", 2.0))
TWO = _evaluation("two", _measured("mt_bench", 2.6), _measured("gsm8k", None))


def test_sets_are_lines_and_evaluations_columns() -> None:
    table = Table((ONE, TWO))
    assert table.header() == ["set", "k", "temperature", "batch", "one", "two", "published"]
    assert table.rows() == [
        ["mt_bench", "3", "0", "1", "2.400 ± 0.050, 1.50×", "2.600 ± 0.050, 1.50×", "2.62 to 2.94"],
        ["chat", "3", "0", "1", "2.000 ± 0.050", "-", ""],
        ["gsm8k", "3", "0", "1", "-", "none: no draft step was made", "2.99 to 3.27"],
    ]


def test_markdown_is_a_table_and_its_notes() -> None:
    lines = Table((ONE, TWO)).markdown().splitlines()
    assert lines[1] == "|---|---|---|---|---|---|---|".replace("|---", "| --- ").replace(" |", " |")
    assert sum(line.startswith("| ") for line in lines) == 5
    assert any("bonus token included" in line for line in lines)


def test_what_is_published_stands_beside_its_own_set_and_length_alone() -> None:
    assert published("MT-Bench", 3) == published("mt_bench", 3) == (2.62, 2.94)
    assert published("mt_bench", 5) is None
    assert published("chat", 3) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"verifier": "w"}, "different verifiers"),
        ({"sets": {"mt_bench": ["other"]}}, "on mt_bench: other prompts"),
        ({"max_tokens": 64}, "max_tokens 128 and 64"),
        ({"outputs_identical": False, "outputs_equal": 3, "prompts": 9}, "only 3 of 9"),
        ({"simulated_acceptance_length": 2.5, "simulated_gap": -0.03}, "2.500, -3.0%"),
    ],
)
def test_notes_say_what_not_to_be_misled_by(changed: dict[str, Any], says: str) -> None:
    other = _evaluation("two", _measured("mt_bench", 2.6), **changed)
    assert any(says in note for note in Table((ONE, other)).notes())
    assert not any(says in note for note in Table((ONE, TWO)).notes())


def test_evaluations_of_before_are_read() -> None:
    old = Evaluation("old", "o", {**_measured("x", 2.1)})
    assert Table((old,)).rows()[0][:5] == ["prompts", "3", "0", "1", "2.100 ± 0.050"]


def test_the_document_has_every_figure() -> None:
    (first, *_) = Table((ONE, TWO)).document()["lines"]
    assert first["published"] == [2.62, 2.94]
    assert [one["acceptance_length"] for one in first["figures"]] == [2.4, 2.6]
    assert first["figures"][0]["speedup"] == 1.5


def test_what_has_no_evaluation_is_refused(made: Project) -> None:
    answer = made.submit()
    (rows,) = answer.outputs["rows"].values()
    found = made.cli("compare", rows)
    assert (found.code, found.out) == (2, "")
    assert "has no evaluation" in found.err
    assert made.cli("compare", "ffff00").code == 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "2.400, pooled, the bonus token included, 3 draft tokens; outputs identical to"),
        ({"outputs_identical": False}, "outputs DIFFERENT from"),
        ({"outputs_identical": None, "outputs_reason": "sampled"}, "not compared: sampled"),
        ({"simulated_acceptance_length": 2.45, "simulated_gap": 0.021}, "simulated 2.450 (+2.1%)"),
        ({"acceptance_length": None, "acceptance_length_reason": "why"}, "unknown: why"),
    ],
)
def test_the_end_of_a_run_says_what_was_measured(changed: dict[str, Any], says: str) -> None:
    metrics = {"acceptance_length": 2.4, "draft_tokens": 3, "outputs_identical": True, **changed}
    assert says in render._acceptance(metrics)
