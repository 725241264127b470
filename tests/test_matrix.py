"""`matrix:` on a stage: its variants, their names, keys and references, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import LIGHT, Project
from hypothesis import given
from hypothesis import strategies as st

from kimi_eagle.manifest.load import LoadedManifest, load
from kimi_eagle.manifest.matrix import MOST
from kimi_eagle.manifest.model import json_schema
from kimi_eagle.manifest.names import LONGEST, variant_name, written
from kimi_eagle.manifest.problem import ManifestError

ABOVE = """\
version: 1
name: sweep
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}]}
  states: {kind: extract, rows: rows}
  vocab: {kind: vocab, rows: rows}
"""
DRAFT = "  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 2%s}\n"
SCORE = "  score: {kind: evaluate, checkpoint: %s, prompts: {path: p.jsonl}%s}\n"
RELEASE = "  release: {kind: export, checkpoint: %s, evaluation: %s}\n"
SWEEP = (
    ABOVE
    + DRAFT % ", matrix: {lr: [1e-4, 3e-4], draft.layers: [1, 2]}"
    + SCORE % ("draft", "")
    + RELEASE % ("draft", "score")
)


def read(folder: Path, text: str, *overrides: str) -> LoadedManifest:
    path = folder / "run.yaml"
    path.write_text(text, "utf-8")
    return load(path, overrides)


def refusals(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        read(folder, text, *overrides)
    return str(caught.value).replace(str(folder) + "/", "").splitlines()


def names(loaded: LoadedManifest, kind: str) -> list[str]:
    return [name for name, stage in loaded.manifest.stages.items() if stage.kind == kind]


def test_a_matrix_says_what_its_variants_say_when_written_by_hand(tmp_path: Path) -> None:
    by_hand = ABOVE
    for lr in ("1e-4", "3e-4"):
        for layers in (1, 2):
            end = f"--lr-{lr}--layers-{layers}"
            draft = DRAFT.replace("draft:", f"draft{end}:", 1)
            by_hand += draft % f", lr: {lr}, draft: {{layers: {layers}}}"
            score = SCORE.replace("score:", f"score{end}:", 1)
            by_hand += score % (f"draft{end}", "")
            release = RELEASE.replace("release:", f"release{end}:", 1)
            by_hand += release % (f"draft{end}", f"score{end}")
    found = read(tmp_path, SWEEP)
    assert found.resolved == read(tmp_path, by_hand).resolved
    assert found.digest == read(tmp_path, by_hand).digest
    assert names(found, "train") == [
        "draft--lr-1e-4--layers-1",
        "draft--lr-1e-4--layers-2",
        "draft--lr-3e-4--layers-1",
        "draft--lr-3e-4--layers-2",
    ]


def test_a_variant_has_the_key_of_the_stage_written_by_hand(made: Project) -> None:
    by_hand = {
        size: made.plan("--set", f"stages.vocab.size={size}")["vocab"]["key"] for size in (64, 256)
    }
    made.write(LIGHT.replace("size: 256", "matrix: {size: [64, 256]}"))
    found = made.plan()
    assert None not in by_hand.values()
    assert {size: found[f"vocab--size-{size}"]["key"] for size in (64, 256)} == by_hand
    assert found["vocab--size-256"]["action"] == "reuse"
    assert found["vocab--size-64"]["action"] == "run"
    # against the stage that it is a variant of
    assert found["vocab--size-64"]["reasons"] == ["size 256 → 64"]
    (why,) = made.cli("why", str(made.manifest), "vocab--size-64", "--json").json["stages"]
    assert why["reasons"] == ["size 256 → 64"]


def test_the_variants_run_and_are_found_by_name(made: Project) -> None:
    made.write(LIGHT.replace("size: 256", "matrix: {size: [64, 256]}"))
    answer = made.submit()
    assert answer.code == 0, answer.err
    assert answer.dispositions["vocab--size-64"] == "executed"
    assert answer.dispositions["vocab--size-256"] == "reused"
    assert answer.outputs["vocab--size-64"] != answer.outputs["vocab--size-256"]
    run = answer.json["run_id"]
    assert made.cli("logs", run, "vocab--size-64").code == 0
    assert (made.root / run / "stages" / "vocab--size-64.json").is_file()


def test_stages_below_fan_out_over_what_they_come_from(tmp_path: Path) -> None:
    text = SWEEP.replace("p.jsonl}", "p.jsonl}, matrix: {draft_tokens: [3, 5]}").replace(
        "sources:", "matrix: {seed: [0, 1]}, sources:"
    )
    found = read(tmp_path, text)
    counts = {kind: len(names(found, kind)) for kind in ("prepare", "extract", "vocab", "train")}
    assert counts == {"prepare": 2, "extract": 2, "vocab": 2, "train": 8}
    assert len(names(found, "evaluate")) == len(names(found, "export")) == 16
    for name in names(found, "train"):
        # states and vocab come from the same rows
        states, vocab = (dict(found.manifest.upstream(name))[role] for role in ("states", "vocab"))
        assert states.removeprefix("states") == vocab.removeprefix("vocab")
        assert dict(found.manifest.upstream(name))["rows"] == states.replace("states", "rows")


def test_a_reference_to_a_variant_takes_that_one_alone(tmp_path: Path) -> None:
    text = ABOVE + DRAFT % ", matrix: {lr: [1e-4, 3e-4]}"
    text += SCORE % ("draft", "") + RELEASE % ("draft--lr-3e-4", "score")
    found = read(tmp_path, text)
    taken = dict(found.manifest.upstream("release"))
    assert (taken["checkpoint"], taken["evaluation"]) == ("draft--lr-3e-4", "score--lr-3e-4")


def test_what_a_stage_takes_from_may_vary(tmp_path: Path) -> None:
    small = "  small: {kind: vocab, rows: rows, matrix: {size: [16, 32]}}\n"
    draft = DRAFT.replace("vocab: vocab, ", "") % ", matrix: {vocab: [vocab, small], seed: [7]}"
    found = read(tmp_path, ABOVE + small + draft)
    taken = {name: dict(found.manifest.upstream(name))["vocab"] for name in names(found, "train")}
    assert taken == {
        "draft--vocab-vocab--seed-7": "vocab",
        "draft--vocab-small--size-16--seed-7": "small--size-16",
        "draft--vocab-small--size-32--seed-7": "small--size-32",
    }


def test_a_matrix_may_be_set_from_outside(tmp_path: Path) -> None:
    text = ABOVE + DRAFT % ", lr: 1e-3"
    one = read(tmp_path, text, "stages.draft.matrix.lr=[1e-4, 2.5e-4]")
    assert names(one, "train") == ["draft--lr-1e-4", "draft--lr-25e-5"]
    two = read(tmp_path, SWEEP, "stages.draft.matrix.draft.layers=[4]")
    assert names(two, "train") == ["draft--lr-1e-4--layers-4", "draft--lr-3e-4--layers-4"]
    drafts = [found.manifest.stages[n] for found in (one, two) for n in names(found, "train")]
    assert {draft.epochs for draft in drafts} == {2}
    (refused,) = refusals(tmp_path, text, "stages.draft.matrix.lr=[1e-4, -1]")
    assert refused == (
        "--set stages.draft.matrix.lr=[1e-4, -1]: stages.draft.matrix.lr.1: "
        "must be greater than 0 (found -1)"
    )
    (refused,) = refusals(tmp_path, SWEEP, "stages.draft.lr=1e-3")
    assert refused.startswith("--set stages.draft.lr=1e-3: stages.draft.lr: is in the matrix too")


def case(tail: str, *expected: str) -> Any:
    return pytest.param(tail, expected, id=tail[:40])


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        case("matrix: {lr: [1e-4, ^true]}", "matrix.lr.1: must be a number (found true)"),
        case("matrix: {^lrr: [1, 2]}", "matrix.lrr: unknown key (found 1); did you mean 'lr'?"),
        case("matrix: {lr: ^[]}", "matrix.lr: must not be empty"),
        case("matrix: {lr: ^1e-4}", "matrix.lr: must be a list of values"),
        case("matrix: {lr: [1, 2, ^1.0]}", "matrix.lr.2: the same value as lr.0"),
        case("matrix: {draft.layers: [1, ^0]}", 'matrix."draft.layers".1: must be at least 1'),
        case("matrix: {^draft.layrs: [1]}", 'matrix."draft.layrs": unknown key'),
        case("matrix: {noise: [null, {kind: ^wave}]}", "matrix.noise.1.kind: must be one of"),
        case("matrix: {noise: [null, ^[]], seed: [0, 1]}", "matrix.noise.1: must be a mapping"),
        case("matrix: {^a.b: [1, 2]}", 'matrix."a.b": unknown key'),
        case("matrix: ^{}", "matrix: must not be empty"),
        case("matrix: ^7", "matrix: must be a mapping"),
        case("matrix: {^kind: [train]}", "matrix.kind: cannot vary"),
        case("^lr: 1, matrix: {lr: [2, 3]}", "lr: is in the matrix too"),
        case(
            "matrix: {loader_workers: [0, ^4]}",
            "matrix.loader_workers.1: 'draft--loader_workers-4' would make the same as "
            "'draft--loader_workers-0'",
        ),
        case(
            "matrix: {noise: [null], ^noise.std: [0.1]}",
            'matrix."noise.std": lies within noise, which varies too',
        ),
        case("lr: 1, matrix: {^lr.x: [1]}", 'matrix."lr.x": lr is not a mapping there'),
        case(
            "matrix: {lr: [1e-4, ^-1], seed: [^x]}",
            "matrix.lr.1: must be greater than 0",
            "matrix.seed.0: must be a whole number",
        ),
        case(
            f"matrix: ^{{seed: [{', '.join(map(str, range(MOST + 1)))}]}}",
            f"matrix: makes more than {MOST} variants",
        ),
    ],
)
def test_what_is_wrong_is_told_once_and_where_it_stands(
    tmp_path: Path, tail: str, expected: tuple[str, ...]
) -> None:
    """A caret is before each thing that is to be found fault with."""
    marked = (DRAFT % f", {tail}").rstrip("\n")
    columns = [match.start() + 1 - index for index, match in enumerate(re.finditer(r"\^", marked))]
    found = refusals(tmp_path, ABOVE + marked.replace("^", "") + "\n" + SCORE % ("draft", ""))
    assert len(found) == len(expected) == len(columns), found
    for line, column, start in zip(found, columns, expected, strict=True):
        assert line.startswith(f"run.yaml:9:{column}: stages.draft.{start}"), line


def test_references_are_judged_as_they_are_written(tmp_path: Path) -> None:
    text = SWEEP.replace("checkpoint: draft, prompts", "checkpoint: draftt, prompts")
    found = refusals(tmp_path, text)
    assert any(
        line.endswith("there is no stage 'draftt' (found 'draftt'); did you mean 'draft'?")
        for line in found
    )
    assert not any("--lr" in line for line in found)
    more = (SCORE % ("draft--lr-1e-4--layers-3", "")).replace("score", "more")
    (other,) = refusals(tmp_path, SWEEP + more)
    assert "did you mean 'draft--lr-1e-4--layers-" in other


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    taken = DRAFT.replace("draft:", "draft--seed-1:") % ""
    (refused,) = refusals(tmp_path, ABOVE + DRAFT % ", matrix: {seed: [1]}" + taken)
    assert "stages.draft--seed-1: a variant of 'draft' has this name" in refused


def test_the_schema_knows_matrix(tmp_path: Path) -> None:
    schema = jsonschema.Draft202012Validator(json_schema())
    varied = DRAFT.replace("vocab: vocab, ", "") % ", matrix: {vocab: [vocab], noise.std: [0, 1]}"
    for good in (SWEEP, ABOVE + varied):
        assert read(tmp_path, good)
        schema.validate(yaml.safe_load(good.replace("e-4", ".0e-4")))
    for bad in ("{lrr: [1]}", "{lr: []}", "{lr: 1}", "{seed: [a]}", "{draft.layers: [0]}", "{}"):
        text = ABOVE + DRAFT % f", matrix: {bad}"
        assert refusals(tmp_path, text)
        assert not schema.is_valid(yaml.safe_load(text))


SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=30)
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(SCALARS | st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=4))
def test_a_name_is_safe_wherever_it_is_written(values: list[Any]) -> None:
    name = variant_name("draft", [(f"Key.{n}", value) for n, value in enumerate(values)])
    assert re.fullmatch("[a-z][a-z0-9_-]*", name)
    assert len(name) <= LONGEST


@given(SCALARS, SCALARS)
def test_two_values_have_two_names(one: Any, other: Any) -> None:
    same = one == other and isinstance(one, bool) == isinstance(other, bool)
    assert (written(one) == written(other)) == same


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1e-4, "1e-4"),
        (0.00025, "25e-5"),
        (2.5, "25e-1"),
        (3.0, "3"),
        (-1, "m1"),
        (True, "true"),
        (None, "null"),
        ("cosine", "cosine"),
        ([2, 4, 5], "2_4_5"),
    ],
)
def test_values_read_as_they_are_written(value: Any, name: str) -> None:
    assert written(value) == name


TRAINED = (
    LIGHT
    + """\
  states: {kind: extract, rows: rows, engine: {kind: transformers}}
  draft:
    kind: train
    head: head
    states: states
    vocab: vocab
    epochs: 2
    ttt_steps: 2
    batch_tokens: 512
    matrix: {lr: [1e-5, 2e-3]}
"""
)


@pytest.mark.slow
def test_variants_are_trained_ranked_plotted_and_compared(project: Project) -> None:
    project.write(TRAINED)
    answer = project.submit()
    assert answer.code == 0, answer.err
    run = answer.json["run_id"]
    good, bad = "draft--lr-2e-3", "draft--lr-1e-5"
    assert {answer.dispositions[name] for name in (good, bad)} == {"executed"}
    for name in (good, bad):
        (events,) = (project.root / run / "tensorboard" / name).iterdir()
        assert "tfevents" in events.name
    ranking = project.cli("rank", run, "--json").json
    assert [trial["stage"] for trial in ranking["trials"]] == [good, bad]
    assert ranking["varied"] == ["lr"]
    plotted = project.cli("show", run, "--plot", "--json").json["trainings"]
    assert {training["stage"] for training in plotted} == {good, bad}
    for training in plotted:
        curves = training["curves"]
        assert {"train/loss", "val/loss", "train/full_acc_1", "val/full_acc_1"} <= curves.keys()
        assert [step for step, _ in curves["val/loss"]][-1] == curves["train/loss"][-1][0]
    checkpoints = [answer.outputs[name]["checkpoint"] for name in (good, bad)]
    weights = project.cli("diff", *checkpoints, "--json").json["weights"]
    assert all(item["relative"] > 0 for item in weights if item["difference"])
    assert any(item["difference"] for item in weights)
    by_hand = TRAINED.replace("matrix: {lr: [1e-5, 2e-3]}", "lr: 2e-3")
    project.write(by_hand)
    assert project.plan()["draft"]["action"] == "reuse"
