"""`why` and `diff`: which leaf made a stage another, and whether figures can be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import LIGHT, Answer, Project

from kimi_eagle.difference import BYTES, INPUTS, METRICS, Side, SideStage, compare


def why(project: Project, *arguments: str) -> dict[str, list[str]]:
    answer = project.cli("why", str(project.manifest), *arguments, "--json")
    assert answer.code == 0, answer.err
    return {stage["name"]: stage["reasons"] for stage in answer.json["stages"]}


def leaves(answer: Answer) -> dict[str, tuple[Any, Any]]:
    assert answer.code == 0, answer.err
    return {item["name"]: (item["a"], item["b"]) for item in answer.json["differences"]}


# why


def test_a_parameter_is_named_with_both_values(made: Project) -> None:
    found = why(made, "--set", "stages.vocab.size=64")
    assert found["vocab"] == ["size 256 → 64"]
    assert made.plan("--set", "stages.vocab.size=64")["vocab"]["reasons"] == found["vocab"]


def test_a_source_is_named_with_both_digests(made: Project) -> None:
    made.chats.write_bytes(made.chats.read_bytes() + b"\n")
    (reason,) = why(made, "rows")["rows"]
    assert reason.startswith("source chats.jsonl changed (")
    assert made.plan()["rows"]["reasons"] == [reason]


def test_files_that_come_and_go_are_named(made: Project) -> None:
    made.chats.rename(made.folder / "more.jsonl")
    data = (made.folder / "more.jsonl").read_bytes()
    (made.folder / "more.jsonl").write_bytes(data + b"\n")
    made.write(LIGHT.replace("chats.jsonl", "more.jsonl"))
    gone, new = why(made, "rows")["rows"]
    assert gone.startswith("source chats.jsonl is gone (was ")
    assert new.startswith("source more.jsonl is new (")


def test_a_file_of_the_verifier_is_named(made: Project) -> None:
    config = made.folder / "verifier" / "generation_config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    found = why(made)
    assert found["head"][0].startswith("verifier generation_config.json changed (")
    assert found["rows"][0].startswith("tokenizer generation_config.json changed (")


def test_a_stage_that_waits_says_what_differs_already(made: Project) -> None:
    arguments = ("--set", "stages.rows.seed=7", "--set", "stages.vocab.size=64")
    assert why(made, *arguments)["vocab"] == ["size 256 → 64", "input rows: rows would run first"]
    assert why(made, "vocab", *arguments)["vocab"] == [
        "size 256 → 64",
        "input rows: rows would run first (seed 0 → 7)",
    ]


def test_a_stage_that_is_reused_says_whose(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    run = first_run[1].json["run_id"]
    answer = made.cli("why", str(made.manifest), "head", "--json")
    (stage,) = answer.json["stages"]
    assert (stage["action"], stage["against"]) == ("reuse", run)
    assert stage["reasons"][0] == f"made by run {run}"


def test_at_first_there_is_nothing_to_compare_with(project: Project) -> None:
    assert why(project)["head"] == ["never made before"]
    assert why(project)["vocab"][0] == "never made before"


def test_a_stage_that_there_is_not_is_told(made: Project) -> None:
    answer = made.cli("why", str(made.manifest), "vocap")
    assert answer.code == 2
    assert "has no stage vocap; did you mean vocab?" in answer.err


def test_why_prints_a_line_a_reason(made: Project, first_run: tuple[Project, Answer]) -> None:
    arguments = ("--set", "stages.vocab.size=64", "--set", "stages.rows.seed=7")
    answer = made.cli("why", str(made.manifest), "vocab", *arguments)
    assert answer.out.splitlines()[0] == "\t".join(
        ("vocab", "depends", first_run[1].json["run_id"], "size 256 → 64")
    )


# diff, of what is there


@pytest.fixture(scope="module")
def two(
    first_run: tuple[Project, Answer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, str, str]:
    """A project with two vocab maps, over other rows and of other sizes, and their digests."""
    project = first_run[0].copy(tmp_path_factory.mktemp("two") / "project")
    before = str(first_run[1].outputs["vocab"]["vocab"])
    lines = project.chats.read_text("utf-8").splitlines(keepends=True)
    project.chats.write_text("".join(lines[1:]), "utf-8")
    answer = project.submit("--set", "stages.vocab.size=64")
    assert answer.code == 0, answer.err
    return project, before, str(answer.outputs["vocab"]["vocab"])


def test_two_artifacts_differ_in_their_smallest_leaves(two: tuple[Project, str, str]) -> None:
    project, one, other = two
    answer = project.cli("diff", one[:12], other[:12], "--json")
    found = leaves(answer)
    assert found["vocab.size"][0] == 256
    assert found["rows: rows of chats.jsonl"] == (10, 9)
    chats = found["rows: chats.jsonl"]
    assert chats[0] != chats[1]
    assert [len(digest) for digest in chats] == [64, 64]
    assert found["rows.conversations"] == (10, 9)
    assert "rows" not in found, "an artifact that differs for what is below it is no leaf"
    assert answer.json["a"] == {"name": one, "kind": "vocab"}
    assert answer.json["equal"] > 10
    assert answer.json["verdict"]["comparable"] is True
    assert any("vocab maps" in text for text in answer.json["verdict"]["warnings"])


def test_runs_are_compared_whole(two: tuple[Project, str, str]) -> None:
    project, _, _ = two
    later, first = (run["id"] for run in project.cli("runs", "--json").json["runs"])
    found = leaves(project.cli("diff", first, later, "--json"))
    assert found["vocab.size"] == (256, 64)
    assert not any(name.startswith("head.") for name in found)


def test_a_manifest_is_compared_as_it_would_run(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    vocab = first_run[1].outputs["vocab"]["vocab"]
    made.write(LIGHT.replace("size: 256", "size: 64").replace("  head: {kind: head}\n", ""))
    assert leaves(made.cli("diff", vocab, str(made.manifest), "--json")) == {
        "vocab.size": (256, 64)
    }
    assert leaves(made.cli("diff", str(made.manifest), str(made.manifest), "--json")) == {}


def test_manifests_need_no_registry(project: Project) -> None:
    other = project.folder / "other.yaml"
    other.write_text(LIGHT.replace("size: 256", "size: 64"), "utf-8")
    answer = project.cli("diff", str(project.manifest), str(other), "--json")
    assert leaves(answer) == {"vocab.size": (256, 64)}


def test_what_diff_prints(two: tuple[Project, str, str]) -> None:
    project, one, other = two
    plain = project.cli("diff", one, other)
    assert "parameters\tvocab.size\t256\t64" in plain.out.splitlines()
    assert plain.out.splitlines()[-3].startswith("comparable: ")
    assert plain.err.endswith("equal hidden (--all shows them)\n")
    whole = project.cli("diff", one, other, "--all")
    assert set(plain.out.splitlines()) < set(whole.out.splitlines())
    assert "parameters\trows.max_length\t512\t512" in whole.out.splitlines()
    markdown = project.cli("diff", one, other, "--md").out.splitlines()
    assert markdown[:2] == [f"|  |  | {one[:12]} | {other[:12]} |", "|---|---|---|---|"]
    assert "| parameters | vocab.size | 256 | 64 |" in markdown


def test_what_cannot_be_compared_is_told(made: Project) -> None:
    answer = made.cli("diff", "0" * 64, str(made.manifest))
    assert answer.code == 2
    assert "starts with 0000" in answer.err
    answer = made.cli("diff", str(made.manifest), "nowhere.yaml")
    assert answer.code == 2
    assert "nowhere.yaml: cannot be read" in answer.err


# diff, the verdict

VERIFIER = {"verifier": {"config.json": "c" * 64}}
HEAD = SideStage("head", "head", 1, {}, VERIFIER, output="1" * 64)
ROWS = SideStage("rows", "prepare", 1, {"seed": 0}, {}, output="2" * 64)
VOCAB = SideStage("vocab", "vocab", 1, {"size": 8}, {}, output="3" * 64)
DRAFT = SideStage(
    "draft",
    "train",
    1,
    {"lr": 1e-3, "loss": "kl_div", "ttt_steps": 3},
    {},
    key="4" * 64,
    output="5" * 64,
    metrics={"val_loss": 2.0, "tokens_per_second": 7.0},
    environment={"python": "3.11.1", "packages": {"torch": "2.13.0"}},
)
SCORE = SideStage(
    "score",
    "evaluate",
    1,
    {"draft_tokens": 3, "engine": {"kind": "vllm"}},
    {**VERIFIER, "prompts": {"prompts.jsonl": "6" * 64}},
    environment={"packages": {"vllm": "0.32.0"}},
)
TRAINED = (HEAD, ROWS, VOCAB, DRAFT)


def side(*stages: SideStage) -> Side:
    return Side("0" * 64, "checkpoint", stages)


def verdict(one: tuple[SideStage, ...], other: tuple[SideStage, ...]) -> tuple[bool, str, str]:
    found = compare(side(*one), side(*other)).verdict
    return found.comparable, "; ".join(found.reasons), "; ".join(found.warnings)


def test_the_same_recipe_is_comparable_and_differs_in_nothing() -> None:
    found = compare(side(*TRAINED), side(*TRAINED))
    assert found.verdict.comparable
    assert found.different == []


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        (0, {"sources": {"verifier": {"config.json": "d" * 64}}}, "different verifiers"),
        (1, {"output": "e" * 64}, "over other rows"),
        (2, {"output": "e" * 64}, "different vocab maps"),
        (3, {"parameters": {**DRAFT.parameters, "ttt_steps": 4}}, "ttt_steps 3 and 4"),
        (3, {"parameters": {**DRAFT.parameters, "loss": "ce"}}, "loss kl_div and ce"),
    ],
)
def test_losses_over_other_things_are_not_comparable(
    number: int, change: dict[str, Any], reason: str
) -> None:
    other = list(TRAINED)
    other[number] = replace(other[number], **change)
    comparable, reasons, _ = verdict(TRAINED, tuple(other))
    assert not comparable
    assert reason in reasons


def test_another_learning_rate_is_comparable() -> None:
    other = replace(DRAFT, parameters={**DRAFT.parameters, "lr": 1e-4})
    assert verdict(TRAINED, (*TRAINED[:3], other))[0]


def test_acceptance_is_comparable_over_other_vocab_maps_with_a_warning() -> None:
    other = (HEAD, ROWS, replace(VOCAB, output="e" * 64), DRAFT, SCORE)
    comparable, reasons, warnings = verdict((*TRAINED, SCORE), other)
    assert comparable
    assert "acceptance lengths" in reasons
    assert "different vocab maps" in warnings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sources": {**VERIFIER, "prompts": {"prompts.jsonl": "7" * 64}}}, "different prompts"),
        ({"parameters": {**SCORE.parameters, "draft_tokens": 5}}, "draft_tokens 3 and 5"),
        ({"environment": {"packages": {"vllm": "0.33.0"}}}, "vLLM 0.32.0 and 0.33.0"),
    ],
)
def test_acceptance_measured_otherwise_is_not_comparable(
    change: dict[str, Any], reason: str
) -> None:
    comparable, reasons, _ = verdict((*TRAINED, SCORE), (*TRAINED, replace(SCORE, **change)))
    assert not comparable
    assert reason in reasons


def test_equal_keys_with_other_bytes_are_shown_as_such() -> None:
    other = replace(DRAFT, output="e" * 64)
    (leaf,) = compare(side(*TRAINED), side(*TRAINED[:3], other)).different
    assert (leaf.section, leaf.a, leaf.b) == (BYTES, "5" * 64, "e" * 64)


def test_stages_with_other_names_are_compared_by_their_kind() -> None:
    other = replace(DRAFT, name="other", parameters={**DRAFT.parameters, "lr": 1e-4})
    found = compare(side(*TRAINED), side(*TRAINED[:3], other))
    assert [(leaf.name, leaf.a, leaf.b) for leaf in found.different] == [
        ("draft/other.lr", 1e-3, 1e-4)
    ]


def test_a_stage_on_one_side_alone_is_named() -> None:
    (leaf,) = compare(side(*TRAINED), side(*TRAINED[:3])).different
    assert (leaf.name, leaf.a, leaf.b) == ("draft", "train, 555555555555", None)


def test_versions_are_shown_once_and_speed_never() -> None:
    environment = {"python": "3.11.1", "packages": {"torch": "2.14.0"}}
    metrics = {"val_loss": 2.5, "tokens_per_second": 1.0}
    other = replace(DRAFT, environment=environment, metrics=metrics)
    found = compare(side(*TRAINED), side(*TRAINED[:3], other)).different
    assert [(leaf.name, leaf.a, leaf.b) for leaf in found] == [
        ("packages.torch", "2.13.0", "2.14.0"),
        ("draft.val_loss", 2.0, 2.5),
    ]
    assert [leaf.section for leaf in found] == ["environment", METRICS]


def test_a_verifier_that_many_stages_take_is_shown_once() -> None:
    other = {"verifier": {"config.json": "d" * 64}}
    score = replace(SCORE, sources={**SCORE.sources, **other})
    found = compare(side(HEAD, SCORE), side(replace(HEAD, sources=other), score)).different
    assert [(leaf.section, leaf.name) for leaf in found] == [(INPUTS, "verifier: config.json")]
