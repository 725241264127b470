"""Evaluation prompts: read as sets are published, asked turn by turn, and counted per set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import DEMO_VERIFIER, demo_verifier, material

from kimi_eagle.engines.asking import Answer, single_streams
from kimi_eagle.rows.prompts import Asked, BadPrompt, read_prompt, read_prompts, went_on
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.evaluate.report import ALL, Decoded, gap, headline, measured, speed
from kimi_eagle.stages.evaluate.spec import EvaluateParams

QUESTION = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("name", "count", "turns"),
    [
        ("mt_bench/question.jsonl", 80, 160),
        ("spec_bench/question.jsonl", 480, 560),
        ("humaneval/HumanEval.jsonl", 164, 164),
        ("gsm8k/test.jsonl", 1319, 1319),
    ],
)
def test_published_sets_are_read_whole(name: str, count: int, turns: int) -> None:
    found = read_prompts(material(f"eval/{name}"), None)
    assert len(found) == count
    assert sum(1 + len(one.later) for one in found) == turns
    assert all(one.messages[-1]["role"] == "user" for one in found)


def test_answers_that_are_published_are_not_asked() -> None:
    record = {"question": "How many?", "answer": "#### 18"}
    assert read_prompt(record, "x") == Asked(({"role": "user", "content": "How many?"},))
    task = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "return 1"}
    assert read_prompt(task, "x").messages[0]["content"] == "def f():\n"


def test_categories_are_read_as_they_are_published() -> None:
    found = read_prompts(material("eval/spec_bench/question.jsonl"), None)
    counts = Counter(one.category for one in found)
    assert (counts["translation"], counts["rag"], counts["writing"]) == (80, 80, 10)
    assert read_prompt({"prompt": "q", "category": 3}, "x").category is None


def test_a_limit_is_of_each_category_where_each_is_a_set(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    lines = [{"category": name, "turns": [f"{name}{number}"]} for name in "ab" for number in "123"]
    path.write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
    asked = [one.messages[0]["content"] for one in read_prompts(path, 2, by_category=True)]
    assert asked == ["a1", "a2", "b1", "b2"]
    assert [one.messages[0]["content"] for one in read_prompts(path, 2)] == ["a1", "a2"]


def test_turns_can_be_limited(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["q", "q2", "q3"]}))
    assert [one.later for one in read_prompts(path, None)] == [("q2", "q3")]
    assert [one.later for one in read_prompts(path, None, 2)] == [("q2",)]
    assert [one.later for one in read_prompts(path, None, 1)] == [()]


@pytest.mark.parametrize("turns", [["q", 3], ["q", " "], "q", [""]])
def test_turns_that_are_no_questions_are_refused(turns: Any) -> None:
    with pytest.raises(BadPrompt, match="x: `turns`"):
        read_prompt({"turns": turns}, "x")


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("…", "yes", {"content": "yes"}),
        ("…<think>", "so</think>yes", {"content": "yes", "reasoning_content": "so"}),
        ("…<think>", "so", {"content": "", "reasoning_content": "so"}),
        ("…", "<think>so</think>yes", {"content": "yes", "reasoning_content": "so"}),
        ("…<think></think>", "yes", {"content": "yes"}),
    ],
)
def test_the_next_turn_follows_what_was_said(prompt: str, answer: str, said: Any) -> None:
    found = went_on([QUESTION], prompt, answer, "q2")
    assert found == [QUESTION, {"role": "assistant", **said}, {"role": "user", "content": "q2"}]


def _job(tmp_path: Path, conversations: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    return {
        "conversations": conversations,
        "runs": None,
        "temperatures": [0.0],
        "seed": 7,
        "thinking": "default",
        "tokenizer": str(DEMO_VERIFIER),
        "max_tokens": 8,
        "draft_tokens": 3,
        "max_model_len": 256,
        "label": "x",
        "events": str(tmp_path / "events"),
        **changed,
    }


def test_a_second_turn_is_asked_after_the_engines_own_answer(tmp_path: Path) -> None:
    """What is sent then is, token for token, what serving would render of the whole talk."""
    tokenizer = load_tokenizer(demo_verifier())
    renderer = Renderer(tokenizer)
    end = renderer.encode("<|im_end|>")
    asked: list[list[int]] = []

    def ask(prompt: list[int], temperature: float, seed: int) -> Answer:
        asked.append(prompt)
        said = renderer.encode(f"thought {seed}</think>answer {seed}") + end
        return Answer(said, [1] * (len(said) - 1), 0.5, "stop")

    first = renderer.encode(renderer.prompt([QUESTION]))
    one = {"set": "s", "conversation": 0, "messages": [QUESTION], "later": ["q2"], "prompt": first}
    (run,) = single_streams(ask, dict, _job(tmp_path, [one]))
    talk = [
        QUESTION,
        {"role": "assistant", "content": "answer 7", "reasoning_content": "thought 7"},
        {"role": "user", "content": "q2"},
    ]
    assert asked == [first, renderer.encode(renderer.prompt(talk))]
    assert [item["turn"] for item in run["requests"]] == [0, 1]
    # Asked again as they were, whatever is answered this time.
    asked.clear()
    again = single_streams(ask, dict, _job(tmp_path, [one], runs=[run]))
    assert asked == [item["prompt"] for item in again[0]["requests"]]
    # Without room for the second, it is left out.
    (short,) = single_streams(ask, dict, _job(tmp_path, [one], max_model_len=40))
    assert [item["turn"] for item in short["requests"]] == [0]


def _request(name: str, number: int, ids: list[int], committed: list[int]) -> dict[str, Any]:
    return {
        "set": name,
        "conversation": number,
        "turn": 0,
        "prompt": [1],
        "token_ids": ids,
        "committed": committed,
        "seconds": 2.0,
        "finish_reason": "stop",
    }


def _run(*requests: dict[str, Any], temperature: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"temperature": temperature, "requests": list(requests), "counters": {}, **more}


A = _request("a", 0, [1, 2, 3, 4], [3])
B = _request("b", 0, [1, 2], [1])
OTHER = _request("b", 0, [1, 9], [1])


def test_sets_are_counted_apart_and_together() -> None:
    decoded = Decoded(3, _run(A, OTHER), _run(A, B))
    assert decoded.sets() == ["a", "b", ALL]
    figures = {name: measured(decoded, name, 0) for name in decoded.sets()}
    assert [figures[name]["acceptance_length"] for name in decoded.sets()] == [3.0, 1.0, 2.0]
    assert [figures[name]["outputs_equal"] for name in decoded.sets()] == [1, 0, 1]
    assert figures[ALL]["outputs_identical"] is False
    assert figures["a"]["outputs_identical"] is True
    assert speed(decoded, "a")["tokens_per_second"] == 2.0


def test_one_set_alone_is_not_counted_twice() -> None:
    assert Decoded(3, _run(A), _run(A)).sets() == ["a"]


def test_the_headline_is_of_all_sets_with_the_first_length_and_temperature() -> None:
    several = [
        Decoded(number, _run(A, B, temperature=t), _run(A, B, temperature=t))
        for number in (3, 5)
        for t in (0.0, 1.0)
    ]
    found = headline([measured(one, name, 0) for one in several for name in one.sets()])
    assert (found["draft_tokens"], found["temperature"], found["prompts"]) == (3, 0.0, 2)
    assert "set" not in found


def test_sampled_outputs_are_not_compared() -> None:
    decoded = Decoded(3, _run(A, temperature=0.7), _run(A, temperature=0.7))
    found = measured(decoded, "a", 5)
    assert (found["outputs_equal"], found["outputs_identical"], found["seed"]) == (None, None, 5)
    assert "sampled" in found["outputs_reason"]


@pytest.mark.parametrize(("likely", "alike"), [(-0.3, True), (-7.0, False), (None, None)])
def test_what_is_sampled_must_be_as_likely_as_without_the_draft(likely: Any, alike: Any) -> None:
    drawn = [
        {**one, "log_probability": None if likely is None else likely * len(one["token_ids"])}
        for one in (A, OTHER)
    ]
    plain = [{**A, "log_probability": -1.5}, {**B, "log_probability": -0.5}]
    decoded = Decoded(3, _run(*drawn, temperature=0.7), _run(*plain, temperature=0.7))
    found = measured(decoded, ALL, 0)
    assert found["sampled_alike"] is alike
    assert found["log_probability_without_draft"] == pytest.approx(-2.0 / 6)


def test_batches_are_compared_beside_two_runs_without_the_draft() -> None:
    batched = {"seconds": 2.0}
    decoded = Decoded(3, _run(A, OTHER, **batched), _run(A, B, **batched), _run(A, OTHER), batch=2)
    found = measured(decoded, ALL, 0)
    assert (found["outputs_equal"], found["outputs_equal_without_draft"]) == (1, 1)
    assert found["outputs_identical"] is None
    assert speed(decoded, ALL)["tokens_per_second"] == 3.0
    assert speed(decoded, "a")["tokens_per_second"] is None  # timed as a whole


def test_no_draft_step_is_null_with_its_reason() -> None:  # EVA-08
    one = _request("a", 0, [1], [])
    found = measured(Decoded(3, _run(one), _run(one)), "a", 0)
    assert found["acceptance_length"] is None
    assert found["acceptance_length_reason"]
    assert gap(2.0, found) is None


def test_the_gap_is_relative_to_what_was_served() -> None:
    served = {"acceptance_length": 2.0, "temperature": 0.0}
    assert gap(2.1, served) == pytest.approx(0.05)
    assert gap(None, served) is None
    assert gap(2.1, {**served, "temperature": 1.0}) is None


def _params(**given: Any) -> EvaluateParams:
    return EvaluateParams.model_validate_json(
        json.dumps({"kind": "evaluate", "checkpoint": "draft", **given})
    )


PROMPTS = {"path": "p.jsonl"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prompts": PROMPTS, "sets": {"a": PROMPTS}},
        {"prompts": PROMPTS, "draft_tokens": [3, 3]},
        {"prompts": PROMPTS, "draft_tokens": []},
        {"prompts": PROMPTS, "temperature": [0, 0]},
        {"sets": {"A B": PROMPTS}},
    ],
    ids=str,
)
def test_manifests_that_measure_nothing_or_one_thing_twice(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        _params(**given)


def test_a_manifest_of_before_is_read_as_before() -> None:
    params = _params(prompts=PROMPTS, draft_tokens=3)
    assert (params.lengths, params.temperatures, list(params.named_sets)) == (
        (3,),
        (0.0,),
        ["prompts"],
    )


def _key_part(**given: Any) -> Callable[[], Any]:
    from kimi_eagle.stages.evaluate.spec import Evaluate

    return Evaluate.identity(_params(prompts=PROMPTS, **given), None)


def test_what_changes_nothing_is_not_in_the_key() -> None:
    assert _key_part(seed=1) == _key_part()
    assert _key_part(simulate_rows=5) == _key_part()
    assert _key_part(seed=1, temperature=1.0) != _key_part(temperature=1.0)
    assert _key_part(batch=2) != _key_part()
    engine = {"kind": "endpoint", "url": "http://a", "plain_url": "http://b"}
    assert _key_part(engine=engine) == _key_part(engine={**engine, "url": "http://c"})


def test_states_are_an_input_and_their_rows_with_them() -> None:
    from kimi_eagle.manifest.model import Manifest

    stages: dict[str, Any] = {
        "head": {"kind": "head"},
        "rows": {"kind": "prepare", "sources": [{"path": "c.jsonl"}]},
        "states": {"kind": "extract", "rows": "rows"},
        "vocab": {"kind": "vocab", "rows": "rows"},
        "draft": {"kind": "train", "head": "head", "states": "states", "vocab": "vocab"},
        "score": {"kind": "evaluate", "checkpoint": "draft", "prompts": PROMPTS},
        "release": {"kind": "export", "checkpoint": "draft", "evaluation": "score"},
    }

    def upstream(stage: str) -> dict[str, str]:
        document = {"version": 1, "name": "x", "verifier": {"path": "v"}, "stages": stages}
        return dict(Manifest.model_validate_json(json.dumps(document)).upstream(stage))

    assert upstream("score") == {"checkpoint": "draft"}
    stages["score"]["states"] = "states"
    assert upstream("score") == {"checkpoint": "draft", "states": "states", "rows": "rows"}
    assert {"rows": "rows", "vocab": "vocab"}.items() <= upstream("release").items()
    assert "states" not in upstream("release")  # a card must not bring evicted states back
    stages["score"]["states"] = "draft"
    with pytest.raises(ValueError, match="kind extract"):
        upstream("score")
