"""The draft's vocabulary: which tokens, and the map as it is checked and stored."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import case_input, case_json
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kimi_eagle.draft.vocab import FILE, REPORT, BadVocab, check_map, load_map, save_map
from kimi_eagle.stages.vocab.choose import choose

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


def test_padding_is_taken_when_every_real_id_is_in() -> None:  # VOC-09
    assert choose({1: 1, 70: 3}, 65, 72, 64).selected == (*range(64), 70)


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
