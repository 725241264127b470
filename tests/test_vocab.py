"""The draft's vocabulary: which tokens, and the map as it is checked and stored."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import case_input, case_json
from conftest import DEMO, LIGHT, Answer, Project
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kimi_eagle.draft.vocab import FILE, REPORT, BadVocab, check_map, load_map, save_map
from kimi_eagle.draft.vocab_import import import_map
from kimi_eagle.job import EventWriter, Given, Job, StageFailed
from kimi_eagle.rows.scripts import script_of
from kimi_eagle.rows.table import TRAIN, VALIDATE, load_rows, save_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.vocab import run as vocab_run
from kimi_eagle.stages.vocab.choose import choose, curve, curve_sizes, rank
from kimi_eagle.stages.vocab.spec import Vocab, VocabParams
from kimi_eagle.verifiers.facts import read_facts

VOCAB, SELECTED, OFFSETS = 12, [0, 3, 5, 9], [0, 2, 3, 6]


def _t2d(selected: list[int] = SELECTED, size: int = VOCAB) -> torch.Tensor:
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[selected] = True
    return t2d


def _d2t() -> torch.Tensor:
    return torch.tensor(OFFSETS)


@pytest.mark.parametrize(
    ("counts", "size", "selected", "filled"),
    [
        pytest.param({3: 2}, 4, (0, 1, 2, 3), 3, id="VOC-01 fewer seen than wanted"),
        pytest.param({10: 9, 11: 8}, 4, (0, 1, 10, 11), 2, id="VOC-01 filled from below"),
        pytest.param({7: 5, 3: 5, 9: 5}, 2, (3, 7), 0, id="VOC-11 ties go to the lower id"),
        pytest.param({11: 1, 0: 0}, 1, (11,), 0, id="a count of zero is not seen"),
        pytest.param({5: 1}, 12, tuple(range(12)), 11, id="VOC-12 everything"),
    ],
)
def test_what_is_chosen(
    counts: dict[int, int], size: int, selected: tuple[int, ...], filled: int
) -> None:
    choice = choose(counts, size, VOCAB, VOCAB)
    assert (choice.selected, choice.filled) == (selected, filled)


@pytest.mark.parametrize(
    ("counts", "size", "says"),
    [
        ({12: 1}, 4, "token id 12 outside verifier vocab 12"),
        ({-1: 1, 3: 1}, 4, "token id -1 outside"),
        ({}, 4, "no supervised tokens"),
        ({3: 0}, 4, "no supervised tokens"),
        ({1: 1}, 13, "draft vocab 13 larger than verifier vocab 12"),
    ],
)
def test_what_cannot_be_chosen_from(counts: dict[int, int], size: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose(counts, size, VOCAB, VOCAB)


def test_public_frequency_cases() -> None:
    for case in case_json("vocab/cases.json")["freq_cases"]:
        counts = {int(token): count for token, count in case["freq"].items()}
        if "error" in case:
            with pytest.raises(ValueError, match=case["error"]):
                choose(counts, case["k"], case["vocab"], case["vocab"])
        else:
            choice = choose(counts, case["k"], VOCAB, VOCAB)
            assert list(choice.selected) == case["selected"], case


@given(
    st.dictionaries(st.integers(0, 11), st.integers(1, 4), min_size=1),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_order_of_counting_never_matters(
    counts: dict[int, int], size: int, shuffle: random.Random
) -> None:
    items = list(counts.items())
    shuffle.shuffle(items)
    choice = choose(counts, size, VOCAB, VOCAB)
    assert choose(dict(items), size, VOCAB, VOCAB) == choice  # VOC-11
    assert len(choice.selected) == len(set(choice.selected)) == size
    assert choice.covered <= choice.total == sum(counts.values())
    missed = [count for token, count in counts.items() if token not in choice.selected]
    kept = [counts.get(token, 0) for token in choice.selected]
    assert max(missed, default=0) <= min(kept)


@pytest.mark.parametrize("size", [1, 63, 64])
@pytest.mark.parametrize("counts", [{58: 1}, {63: 9, 70: 99}], ids=["special", "padding seen"])
def test_padding_is_never_taken_while_a_real_id_remains(size: int, counts: Any) -> None:  # VOC-09
    note = json.loads(case_input("verifiers/padded_vocab/TOKENIZER_NOTE.json").read_text())
    whole, real = note["config.vocab_size"], note["len(tokenizer)"]
    selected = choose(counts, size, whole, real).selected
    assert max(selected) < real
    assert next(iter(counts)) in selected  # special ids count like any other


def test_padding_is_not_taken_when_every_real_id_is_in() -> None:  # VOC-09
    with pytest.raises(ValueError, match=r"65 larger than the 64 tokens .* 72 are padding"):
        choose({1: 1, 70: 3}, 65, 72, 64)


@pytest.mark.parametrize(
    ("include", "size", "selected", "forced"),
    [
        ([], 2, (3, 7), 0),
        ([11], 2, (3, 11), 1),
        ([3, 11], 2, (3, 11), 1),
        ([0, 11], 3, (0, 3, 11), 2),
        ([7, 7], 2, (3, 7), 0),
    ],
)
def test_what_must_be_included_is_taken_before_what_is_frequent(
    include: list[int], size: int, selected: tuple[int, ...], forced: int
) -> None:
    choice = choose({3: 9, 7: 5, 9: 1}, size, VOCAB, VOCAB, include)
    assert (choice.selected, choice.forced) == (selected, forced)
    assert choice.covered == sum({3: 9, 7: 5, 9: 1}.get(token, 0) for token in selected)


@pytest.mark.parametrize(
    ("include", "says"),
    [([1, 2, 3], "3 tokens to include do not fit a draft vocab of 2"), ([11], "11 is not one of")],
)
def test_what_cannot_be_included(include: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose({3: 9}, 2, VOCAB, 10, include)


def test_the_curve_says_what_another_size_would_cover() -> None:
    counts, apart = {3: 6, 7: 3, 9: 1}, {3: 1, 11: 1}
    order = rank(counts, VOCAB)
    found = curve(counts, apart, order, [2, 1, 12])
    assert found == [
        {"size": 1, "coverage": 0.6, "coverage_val": 0.5},
        {"size": 2, "coverage": 0.9, "coverage_val": 0.5},
        {"size": 12, "coverage": 1.0, "coverage_val": 1.0},
    ]
    for point in found:
        size = int(point["size"] or 0)
        choice = choose(counts, size, VOCAB, VOCAB)
        assert choice.covered / choice.total == point["coverage"]
    assert curve_sizes(1000, 300) == [64, 128, 256, 300, 512, 1000]
    assert curve_sizes(1024, 1024) == [64, 128, 256, 512, 1024]


def test_offsets_are_verifier_id_minus_draft_id() -> None:
    choice = choose(dict.fromkeys(SELECTED, 1), 4, VOCAB, VOCAB)
    assert choice.offsets == OFFSETS
    assert [index + offset for index, offset in enumerate(choice.offsets)] == SELECTED


def test_coverage_counts_occurrences() -> None:
    choice = choose({1: 6, 2: 3, 3: 1}, 2, VOCAB, VOCAB)
    assert (choice.covered, choice.total) == (9, 10)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
def test_whole_dtypes_are_normalised(dtype: torch.dtype, offsets: torch.dtype) -> None:  # VOC-05
    found = check_map(_t2d().to(dtype), _d2t().to(offsets), VOCAB, 4)
    assert (found.t2d.dtype, found.d2t.dtype) == (torch.bool, torch.int64)
    assert torch.equal(found.t2d, _t2d())
    assert torch.equal(found.d2t, _d2t())


@pytest.mark.parametrize(
    ("t2d", "d2t", "says"),
    [
        pytest.param(_t2d().to(torch.uint8) * 255, _d2t(), "255", id="VOC-05 0 and 255"),
        pytest.param(_t2d().float(), _d2t(), "float32", id="VOC-05 t2d float"),
        pytest.param(_t2d(), _d2t().float(), "float32", id="VOC-05 d2t float"),
        pytest.param(_t2d(), _d2t().bool(), "bool", id="d2t bool"),
        pytest.param(_t2d([0, 3, 5, 9, 11]), _d2t(), "5 tokens.* 4", id="VOC-08 count"),
        pytest.param(_t2d(size=10), _d2t(), r"\[10\].* 12", id="VOC-08 length"),
        pytest.param(_t2d().reshape(3, 4), _d2t(), r"\[3, 4\].* 12", id="shape"),
        pytest.param(_t2d(), _d2t()[:3], r"\[3\].* 4", id="d2t length"),
        pytest.param(_t2d(), torch.tensor(SELECTED), "absolute ids", id="absolute"),
        pytest.param(_t2d(), torch.tensor([0, 2, 3, 7]), "does not point", id="one wrong"),
        pytest.param(_t2d(), torch.tensor([0, 2, 6, 3]), "does not point", id="swapped"),
        pytest.param(_t2d(), torch.tensor([0, 2, 3, 99]), "does not point", id="outside"),
    ],
)
def test_maps_that_do_not_hold_together_are_refused(t2d: Any, d2t: Any, says: str) -> None:
    with pytest.raises(BadVocab, match=says):
        check_map(t2d, d2t, VOCAB, 4)


@pytest.mark.parametrize("name", ["uint8_t2d", "int64_t2d", "uint8_255_t2d", "five_true_t2d"])
def test_public_t2d_files(name: str) -> None:  # VOC-05, VOC-08
    t2d = torch.from_numpy(np.load(case_input(f"vocab/{name}.npy")))
    if name in ("uint8_t2d", "int64_t2d"):
        assert torch.equal(check_map(t2d, _d2t(), VOCAB, 4).t2d, _t2d())
    else:
        with pytest.raises(BadVocab):
            check_map(t2d, _d2t(), VOCAB, 4)


def test_public_short_t2d_is_refused_with_both_numbers() -> None:  # VOC-08
    t2d = torch.from_numpy(np.load(case_input("vocab/short_t2d.npy")))
    with pytest.raises(BadVocab, match=r"10.*12"):
        check_map(t2d, _d2t(), VOCAB, 4)


def test_public_offsets_and_their_absolute_misreading() -> None:
    vectors = case_json("vocab/cases.json")
    size = vectors["vocab_size"]
    t2d = _t2d(vectors["selected"], size)
    check_map(t2d, torch.tensor(vectors["d2t_offsets"]), size, 4)
    with pytest.raises(BadVocab):
        check_map(t2d, torch.tensor(vectors["targets_if_absolute_misread"]), size, 4)


def _stored(folder: Path, size: int = 4) -> Path:
    report = {"verifier_vocab_size": VOCAB, "size": size}
    (folder / REPORT).write_text(json.dumps(report), "utf-8")
    return folder


def test_a_map_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save_map(tmp_path, SELECTED, VOCAB)
    found = load_map(_stored(tmp_path))
    assert found.d2t.tolist() == OFFSETS
    assert load_file(tmp_path / FILE)["t2d"].dtype == torch.bool


def test_no_map_is_the_whole_vocabulary(tmp_path: Path) -> None:  # VOC-12
    found = load_map(_stored(tmp_path, VOCAB))
    assert (found.t2d, found.d2t, found.draft_size) == (None, None, VOCAB)


def test_a_missing_map_is_not_the_whole_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(BadVocab, match="4 out of 12"):
        load_map(_stored(tmp_path))


def test_half_a_map_is_refused(tmp_path: Path) -> None:
    save_file({"t2d": _t2d()}, tmp_path / FILE)
    with pytest.raises(BadVocab, match="t2d and d2t"):
        load_map(_stored(tmp_path))


# A map that another tool made


def _file(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def _npy(folder: Path, **tensors: torch.Tensor) -> list[Path]:
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
    return sorted(folder.glob("*.npy"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize(
    "d2t",
    [_d2t(), _d2t().int(), torch.tensor(SELECTED), None],
    ids=["offsets", "int32", "absolute", "none"],
)
def test_every_form_of_a_map_comes_to_the_same_bytes(
    tmp_path: Path, dtype: torch.dtype, d2t: torch.Tensor | None
) -> None:  # VOC-05
    given = {"t2d": _t2d().to(dtype)} | ({"d2t": d2t} if d2t is not None else {})
    one = import_map([_file(tmp_path / "m.safetensors", fc=torch.ones(2), **given)], VOCAB)
    other = import_map(_npy(tmp_path, **given), VOCAB)
    for found in (one, other):
        assert (found.t2d.dtype, found.d2t.dtype) == (torch.bool, torch.int64)
        folder = tmp_path / "saved"
        folder.mkdir(exist_ok=True)
        save_map(folder, found.t2d.nonzero().flatten().tolist(), VOCAB)
        written = (folder / FILE).read_bytes()
        save_map(folder, SELECTED, VOCAB)
        assert (folder / FILE).read_bytes() == written


@pytest.mark.parametrize(
    ("d2t", "reading", "selected"),
    [
        (OFFSETS, "auto", None),  # ascending too: tokens 0, 2, 3 and 6 would do as well
        (OFFSETS, "offsets", SELECTED),
        (OFFSETS, "absolute", OFFSETS),
        ([0, 1, 1, 3], "auto", [0, 2, 3, 6]),
        (SELECTED, "auto", [0, 3, 5, 9]),
    ],
)
def test_d2t_alone_is_read_where_it_can_be_read_in_one_way(
    tmp_path: Path, d2t: list[int], reading: str, selected: list[int] | None
) -> None:
    path = _file(tmp_path / "m.safetensors", d2t=torch.tensor(d2t))
    if selected is None:
        with pytest.raises(BadVocab, match="say which"):
            import_map([path], VOCAB, reading)
    else:
        found = import_map([path], VOCAB, reading)
        assert found.t2d.nonzero().flatten().tolist() == selected


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"t2d": _t2d().byte() * 255}, "255"),
        ({"t2d": _t2d().float()}, "float32"),
        ({"t2d": _t2d(size=10)}, r"\[10\] for a verifier vocab of 12"),
        ({"t2d": _t2d(), "d2t": _d2t().float()}, "d2t must be integers, found torch.float32"),
        ({"t2d": _t2d([0, 3, 5, 9, 11]), "d2t": _d2t()}, "d2t has 4 tokens, and t2d marks 5"),
        ({"t2d": _t2d(), "d2t": torch.tensor([0, 2, 3, 7])}, "draft id 3 is 10, and t2d marks 9"),
        ({"d2t": torch.tensor([0, 9, 5, 3])}, "not ascending"),
        ({"d2t": torch.tensor([0, 3, 5, 40])}, "it names token 43 of a verifier vocab of 12"),
        ({"d2t": torch.tensor([[1]])}, "shape"),
        ({"other": torch.ones(3)}, "neither t2d nor d2t"),
    ],
)
def test_a_map_that_says_two_things_is_refused_in_words(
    tmp_path: Path, tensors: dict[str, torch.Tensor], says: str
) -> None:  # VOC-05, VOC-08
    with pytest.raises(BadVocab, match=says):
        import_map([_file(tmp_path / "m.safetensors", **tensors)], VOCAB)


def test_files_that_are_no_map_are_refused(tmp_path: Path) -> None:
    for name, says in (("m.pt", "torch.save"), ("m.npy", "name it"), ("t2d.npy", "cannot be re")):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(BadVocab, match=says):
            import_map([tmp_path / name], VOCAB)
    np.save(tmp_path / "t2d.npy", np.array(["a"], dtype=object), allow_pickle=True)
    with pytest.raises(BadVocab, match="cannot be read"):
        import_map([tmp_path / "t2d.npy"], VOCAB)


@pytest.mark.parametrize("name", ["uint8_t2d", "int64_t2d", "uint8_255_t2d", "five_true_t2d"])
def test_public_t2d_files_are_taken_in_or_refused(name: str) -> None:  # VOC-05, VOC-08
    paths = [case_input(f"vocab/{name}.npy"), case_input("vocab/int32_d2t.npy")]
    if name in ("uint8_t2d", "int64_t2d"):
        assert import_map(paths, VOCAB).d2t.tolist() == OFFSETS
    else:
        with pytest.raises(BadVocab):
            import_map(paths, VOCAB)


# The stage


class Stage:
    """The stage as its worker runs it, over the rows of the first run, without the rest."""

    def __init__(self, folder: Path, rows: Path):
        self.folder, self.rows = folder, rows
        self._count = 0

    def run(self, **fields: Any) -> tuple[Path, dict[str, Any]]:
        """The artifact's folder and its report."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        params = VocabParams.model_validate({"kind": "vocab", "rows": "rows", **fields})
        files = [params.map.path] if params.map else []
        inputs = {
            "rows": (Given("", str(self.rows)),),
            "tokenizer": (Given("", str(DEMO / "verifier")),),
            "map": tuple(Given("", str(self.folder / name)) for name in files),
        }
        verifier = str(DEMO / "verifier")
        job = Job("vocab", "vocab", {}, inputs, verifier, str(folder), str(folder), "")
        context = Context(job, params, EventWriter(folder / "events"))
        vocab_run.run(context)
        out = context.out("vocab")
        return out, json.loads((out / REPORT).read_text("utf-8"))


@pytest.fixture(scope="module")
def stage(first_run: tuple[Project, Answer], tmp_path_factory: pytest.TempPathFactory) -> Stage:
    project, answer = first_run
    return Stage(tmp_path_factory.mktemp("vocab"), project.object_of(answer, "rows"))


def test_the_report_says_what_is_covered_where(stage: Stage) -> None:
    folder, report = stage.run(size=128)
    rows = load_rows(stage.rows)
    counts = Counter[int]()
    for row in rows.indices(TRAIN):
        counts.update(rows.ids(row)[rows.mask(row) == 1].tolist())
    chosen = set(load_map(folder).t2d.nonzero().flatten().tolist())
    covered = sum(count for token, count in counts.items() if token in chosen)
    assert report["coverage"] == covered / counts.total()
    assert report["by_source"]["0"]["tokens"] == counts.total()
    assert report["by_source"]["0"]["coverage"] == report["coverage"]
    assert report["by_source"]["0"]["coverage_val"] == report["coverage_val"]
    assert sum(part["tokens"] for part in report["by_script"].values()) == counts.total()
    assert "Latin" in report["by_script"]
    (point,) = (point for point in report["curve"] if point["size"] == 128)
    assert point["coverage"] == report["coverage"]
    assert point["coverage_val"] == report["coverage_val"]
    shares = [point["coverage"] for point in report["curve"]]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {item["token"] for item in report["include"]} == {"<|im_end|>", "</think>"}
    assert all(item["known"] for item in report["include"])


def test_rows_kept_apart_have_no_say_in_the_choice(tmp_path: Path) -> None:
    split, apart = [TRAIN, VALIDATE], [[0, 1, 1], [0, 1, 1]]
    save_rows(tmp_path, [[1, 2, 3], [4, 5, 5]], apart, split, [0, 0], [1, 2])
    rows = load_rows(tmp_path)
    assert vocab_run._counts(rows, TRAIN) == {2: 1, 3: 1}
    assert vocab_run._counts(rows, VALIDATE) == {5: 2}


@pytest.mark.parametrize("size", ["full", None, 1024])
def test_the_whole_vocabulary_is_stored_as_a_map_of_nothing(stage: Stage, size: Any) -> None:
    folder, report = stage.run(size=size)  # VOC-12
    stored = load_file(folder / FILE)
    assert bool(stored["t2d"].all())
    assert not bool(stored["d2t"].any())
    assert load_map(folder).t2d is None
    assert (report["size"], report["coverage"]) == (1024, 1.0)


def test_two_ways_to_say_the_whole_vocabulary_are_one() -> None:
    facts = read_facts(json.loads((DEMO / "verifier" / "config.json").read_text("utf-8")))
    full, null = (
        VocabParams.model_validate({"kind": "vocab", "rows": "rows", "size": size})
        for size in ("full", None)
    )
    assert Vocab.identity(full, facts) == Vocab.identity(null, facts)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"size": 64, "include": ("<|im_ende|>",)}, r"did you mean '<\|im_end\|>'"),
        ({"size": 64, "include": (1024,)}, "1024 is not one of the 1024"),
        ({"size": 1, "include": (1, 2)}, "2 tokens to include do not fit a draft vocab of 1"),
        ({"size": 9, "map": {"path": "t2d.npy"}}, "the map has 4 tokens, and size says 9"),
        ({"include": (70,), "map": {"path": "t2d.npy"}}, r"lacks 1 tokens to include: \[70\]"),
        ({"map": {"path": "short_t2d.npy"}}, r"\[10\] for a verifier vocab of 1024"),
    ],
)
def test_what_the_stage_refuses(stage: Stage, fields: dict[str, Any], says: str) -> None:
    np.save(stage.folder / "t2d.npy", _t2d(size=1024).numpy())
    np.save(stage.folder / "short_t2d.npy", _t2d(size=10).numpy())
    with pytest.raises(StageFailed, match=says):
        stage.run(**fields)


def test_a_map_and_the_whole_vocabulary_are_not_asked_for_together(project: Project) -> None:
    project.write(LIGHT.replace("size: 256", "size: full, map: {path: t2d.npy}"))
    answer = project.cli("validate", str(project.manifest))
    assert answer.code == 2
    assert "7:10: stages.vocab: has both a map and `size: full`" in answer.err


def test_a_map_that_is_not_there_is_refused_at_its_place(project: Project) -> None:
    project.write(LIGHT.replace("size: 256", "map: {path: t2d.npy}"))
    answer = project.cli("plan", str(project.manifest))
    assert answer.code == 2
    assert "stages.vocab.map.path: no file at" in answer.err


def test_a_map_is_taken_in_and_what_it_covers_is_said(stage: Stage) -> None:
    folder, chosen = stage.run(size=96)
    stored = load_file(folder / FILE)
    ids = stored["t2d"].nonzero().flatten()
    save_file({"t2d": stored["t2d"].byte(), "d2t": ids}, stage.folder / "old.safetensors")
    taken, report = stage.run(map={"path": "old.safetensors"})
    assert (taken / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert report["imported"]
    assert report["coverage"] == chosen["coverage"]
    assert report["by_script"] == chosen["by_script"]


def test_a_map_without_a_token_that_rows_hold_is_taken_and_says_so(stage: Stage) -> None:
    np.save(stage.folder / "t2d.npy", _t2d(size=1024).numpy())
    folder, report = stage.run(map={"path": "t2d.npy"})
    assert not any(item["known"] for item in report["include"])
    assert "the map lacks 2 added tokens" in (folder.parent.parent / "events").read_text()


def test_included_tokens_are_in_the_map(stage: Stage) -> None:
    folder, report = stage.run(size=64, include=("<|im_user|>", 900))
    ids = [item["id"] for item in report["include"]]
    assert 900 in ids
    assert len(ids) == 2
    assert bool(load_file(folder / FILE)["t2d"][ids].all())
    assert (report["size"], report["forced"]) == (64, 2)


# Scripts


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("The larger number is 57.", "Latin"),
        ("Größer ist 57.", "Latin"),
        ("ＡＢＣ", "Latin"),
        ("数字五十七更大。", "Han"),
        ("数字は五十七です。", "Japanese"),
        ("Число 57 больше.", "Cyrillic"),
        ("57은 더 큽니다", "Hangul"),
        ("العدد أكبر", "Arabic"),
        ("संख्या", "Devanagari"),
        ("Ja, 数字五十七更大。", "Han"),
        ("3.14159 26535", "Digits"),
        ("a 3.14159", "Digits"),
        ("… — !", "Symbols"),
        ("", "Symbols"),
        ("So:\n```python\nfor row in rows:\n    print(row)\n```", "Code"),
        ("```python\nfor row in rows:\n    print(row)", "Code"),
        ("A word, `x`, and a lot of text around it.", "Latin"),
    ],
)
def test_a_texts_script(text: str, script: str) -> None:
    assert script_of(text) == script
