"""Hidden states: what is refused before it is stored, and what tells the stored ones apart."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import case_input
from safetensors.torch import load_file

from kimi_eagle.job import StageFailed
from kimi_eagle.records import ShardRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.schema import FILE
from kimi_eagle.states.checks import ALL_ZERO, BadStates, _bits, check_states
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.index import Place, placed_rows
from kimi_eagle.states.layout import (
    ROWS,
    StateRow,
    read_rows,
    shard_path,
    stored_digests,
    write_rows,
)
from kimi_eagle.states.reader import ShardReader
from kimi_eagle.states.refusals import Refusals
from kimi_eagle.states.shards import ShardWriter
from kimi_eagle.states.stored_row import store

TOKENS, LAYERS, HIDDEN = 6, 4, 8
IDS = torch.arange(11, 11 + TOKENS)
CONTRACT = LayerContract((2, 4, 5, 8), HIDDEN, "bfloat16", "vllm")


def _states(tokens: int = TOKENS) -> Any:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, LAYERS, HIDDEN, generator=generator).to(torch.bfloat16)


def content_digest(states: Any) -> str:
    return store(states, CONTRACT).digest


def _public(name: str) -> tuple[Any, Any]:
    found = load_file(case_input(f"hidden/hs_{name}.safetensors"))
    return found["hidden_states"], found["token_ids"]


def test_good_states_pass() -> None:
    check_states(_states(), IDS.int(), IDS, LAYERS, HIDDEN)


def test_public_good_states_pass() -> None:
    states, ids = _public("good")
    check_states(states, ids, ids, LAYERS, HIDDEN)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("all_zero", "all zero", id="EXT-03 all zero"),
        pytest.param("last_layer_zero", "layer slot 3 is all zero", id="EXT-03 last layer"),
        pytest.param("zero_rows_2_3", "token 2 in layer slot 0 is all zero", id="EXT-03 rows"),
        pytest.param("three_layers", r"\[6, 3, 8\]; expected \[6, 4, 8\]", id="EXT-07 layers"),
        pytest.param("wrong_hidden", r"\[6, 4, 6\]; expected \[6, 4, 8\]", id="EXT-07 width"),
        pytest.param("duplicated_layers", "hold the same states", id="EXT-07 repeated"),
        pytest.param("layer_major", r"\[4, 6, 8\]; expected \[6, 4, 8\]", id="EXT-08 order"),
    ],
)
def test_public_degenerate_states_are_refused(name: str, says: str) -> None:
    states, ids = _public(name)
    with pytest.raises(BadStates, match=says):
        check_states(states, ids, ids, LAYERS, HIDDEN)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("extra_bos", "ran 7 tokens, 6 were sent: they differ at 0", id="EXT-09 BOS"),
        pytest.param("wrong_tokens", "they differ at", id="EXT-09, EXT-15 other tokens"),
        pytest.param("sparse_zeros", "they differ at", id="EXT-06 tail of zeros"),
    ],
)
def test_public_states_of_other_tokens_are_refused(name: str, says: str) -> None:
    states, ids = _public(name)
    sent = _public("good")[1]
    with pytest.raises(BadStates, match=says):
        check_states(states, ids, sent, LAYERS, HIDDEN)


@pytest.mark.parametrize(
    ("ran", "at"),
    [
        ([1, *range(11, 17)], 0),
        ([11, 11, *range(12, 17)], 1),
        (list(range(11, 18)), 6),
        (list(range(11, 16)), 5),
        ([], 0),
        ([11, 12, 13, 99, 15, 16], 3),
    ],
)
def test_other_ids_are_refused_where_they_first_differ(ran: list[int], at: int) -> None:  # EXT-09
    with pytest.raises(BadStates, match=f"differ at {at}"):
        check_states(_states(len(ran)), torch.tensor(ran), IDS, LAYERS, HIDDEN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_refused(value: float) -> None:
    states = _states()
    states[3, 2, 1] = value
    with pytest.raises(BadStates, match="not finite"):
        check_states(states, IDS, IDS, LAYERS, HIDDEN)


def test_one_zero_vector_is_refused_and_a_zero_is_not() -> None:  # EXT-03
    states = _states()
    states[4, 1, :-1] = 0.0
    check_states(states, IDS, IDS, LAYERS, HIDDEN)
    states[4, 1] = -0.0
    with pytest.raises(BadStates, match="token 4 in layer slot 1"):
        check_states(states, IDS, IDS, LAYERS, HIDDEN)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 3), (0, 3)])
def test_any_two_layers_alike_are_refused(pair: tuple[int, int]) -> None:  # EXT-07
    states = _states()
    states[:, pair[1]] = states[:, pair[0]]
    with pytest.raises(BadStates, match=f"slots {pair[0]} and {pair[1]} hold the same"):
        check_states(states, IDS, IDS, LAYERS, HIDDEN)


@pytest.mark.parametrize("shape", [(24, 8), (1, 6, 4, 8), (6, 8, 4), (0, 4, 8)], ids=str)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:  # EXT-08
    with pytest.raises(BadStates, match="expected"):
        check_states(torch.ones(shape), IDS, IDS, LAYERS, HIDDEN)


def test_every_number_is_judged_as_torch_judges_it() -> None:
    """All 65,536 of bfloat16, each alone in a vector and beside a good one."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for beside in (0.0, 1.0, -1.0):
        states = torch.stack([every, torch.full_like(every, beside)], dim=-1)[:, None]
        finite, zero, _ = _bits(states)
        assert np.array_equal(finite, torch.isfinite(states).all(-1).numpy())
        assert np.array_equal(zero, (states == 0).all(-1).numpy())


def test_states_of_other_types_are_looked_at_too() -> None:
    for kind in (torch.float32, torch.float16):
        states = _states().to(kind)
        check_states(states, IDS, IDS, LAYERS, HIDDEN)
        states[2, 1, 3] = float("inf")
        with pytest.raises(BadStates, match="token 2 in layer slot 1 holds a number"):
            check_states(states, IDS, IDS, LAYERS, HIDDEN)


def test_layers_of_equal_extremes_are_not_taken_for_the_same() -> None:
    states = _states()
    states[:, 1] = states[:, 0].flip(-1)
    check_states(states, IDS, IDS, LAYERS, HIDDEN)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((4, 4, 8), "2 tokens have no states, as when an engine takes a prefix from its cache"),
        ((6, 8, 4), "the axes are in another order"),
    ],
)
def test_what_is_likely_behind_another_shape_is_said(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(BadStates, match=says):
        check_states(torch.ones(shape), IDS, IDS, LAYERS, HIDDEN)


def test_a_server_that_adds_a_bos_is_told_apart() -> None:  # EXT-09
    with pytest.raises(BadStates, match=r"put token 1 before them \(a BOS\)"):
        check_states(_states(7), torch.tensor([1, *range(11, 17)]), IDS, LAYERS, HIDDEN)


def _refuse(refusals: Refusals, rows: int, reason: str = ALL_ZERO) -> None:
    for row in range(rows):
        refusals.add(f"{row:064x}", BadStates(reason, "the state of token 4 is all zero"))


def test_no_row_is_refused_in_silence() -> None:
    told: list[str] = []
    with pytest.raises(StageFailed, match=r"row 000000000000: the state of .* \(max_bad_rows 0 of"):
        _refuse(Refusals(0, 10, told.append), 1)
    refusals = Refusals(2, 10, told.append)
    _refuse(refusals, 2)
    assert [line[:12] for line in told] == ["row 00000000", "row 00000000"]
    assert refusals.document() == {"rows_refused": 2, "refused": {"all-zero": 2}}
    with pytest.raises(
        StageFailed, match="max_bad_rows 2 of 10 rows; refused: 2 all-zero, 1 shape"
    ):
        refusals.add("f" * 64, BadStates("shape", "states have shape [1]"))


@pytest.mark.parametrize(("limit", "rows", "allowed"), [(0.05, 100, 5), (0.05, 19, 0), (3, 1, 3)])
def test_a_limit_is_a_number_of_rows_or_a_share(limit: float, rows: int, allowed: int) -> None:
    refusals = Refusals(limit, rows, lambda _: None)
    _refuse(refusals, allowed)
    with pytest.raises(StageFailed):
        _refuse(refusals, allowed + 1)


def test_a_stage_of_which_no_row_is_left_fails() -> None:
    refusals = Refusals(5, 5, lambda _: None)
    _refuse(refusals, 5)
    with pytest.raises(StageFailed, match=r"no row is left: all 5 were refused \(5 all-zero\)"):
        refusals.require(0)
    refusals.require(1)


def test_another_axis_order_has_another_digest() -> None:
    """EXT-08: where both orders fit, shape says nothing; content and contract do."""
    states, ids = _public("square_ambiguous")
    check_states(states, ids, ids, LAYERS, HIDDEN)
    assert content_digest(states) != content_digest(states.transpose(0, 1))


def _write(root: Path, rows: dict[str, tuple[Any, Any]]) -> tuple[ShardReader, dict[str, Place]]:
    """A shard of rows, published under a name of its own, and where each row lies."""
    staging = root / "staging"
    staging.mkdir()
    names: list[str] = []
    writer = ShardWriter(staging, CONTRACT, 1 << 30, names.append)
    for key, (states, ids) in rows.items():
        writer.add(key, states, ids)
    writer.flush()
    shard = "5" * 64
    path = shard_path(root, shard)
    path.parent.mkdir(parents=True)
    (staging / names[0]).rename(path)
    places, start = {}, 0
    for key, (states, _) in rows.items():
        places[key] = Place(shard, start, len(states), writer.digests[key])
        start += len(states)
    return ShardReader(root), places


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    """EXT-08: also a square row, in the order that the format fixes."""
    rows = {"a": (_states(6), IDS), "b": (_states(4), IDS[:4]), "c": (_states(1), IDS[:1])}
    reader, places = _write(tmp_path, rows)
    for key, (states, ids) in rows.items():
        read, tokens = reader.read(places[key])
        assert torch.equal(read, states)
        assert torch.equal(tokens.to(torch.int64), ids)
        assert content_digest(read) == places[key].digest


def test_a_row_is_looked_at_in_place_and_never_changed_for_others(tmp_path: Path) -> None:
    reader, places = _write(tmp_path, {"a": (_states(6), IDS), "b": (_states(4), IDS[:4])})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    first, _ = reader.read(places["b"])
    again, _ = reader.read(places["b"])
    assert first.data_ptr() == again.data_ptr(), "nothing was copied"
    first[:] = 0  # a mistake of who was given it
    assert {path: path.read_bytes() for path in before} == before
    other = pickle.loads(pickle.dumps(reader))
    assert content_digest(other.read(places["b"])[0]) == places["b"].digest


def test_a_row_that_ends_after_its_shard_is_no_row(tmp_path: Path) -> None:
    reader, places = _write(tmp_path, {"a": (_states(6), IDS)})
    with pytest.raises(ValueError, match="holds 6 tokens, a row of it ends at 7"):
        reader.read(replace(places["a"], start=1))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-64] + b"\x00" * 64, id="EXT-06 tail of zeros"),
        pytest.param(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], id="one bit"),
    ],
)
def test_altered_bytes_of_the_right_size_have_another_digest(damage: Any) -> None:  # EXT-06
    states = _states()
    data = damage(states.view(torch.uint8).numpy().tobytes())
    altered = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(states.shape)
    assert content_digest(altered) != content_digest(states)


def test_the_contract_records_convention_and_last_layer() -> None:
    document = CONTRACT.document()
    assert document["layers"] == [2, 4, 5, 8]
    assert "embeddings-are-0" in document["convention"]
    assert CONTRACT.bytes_per_token == 4 * 8 * 2


def test_bytes_per_token_of_the_real_model() -> None:
    assert LayerContract((2, 30, 58, 61), 7168, "bfloat16", "vllm").bytes_per_token == 57_344


ROW = StateRow("a" * 64, "0" * 64, 12)


def test_listed_rows_read_back() -> None:
    rows = [ROW, StateRow("b" * 64, "1" * 64, 1), StateRow("c" * 64, "", 7, "not-finite")]
    assert read_rows(write_rows(rows)) == rows
    assert read_rows("") == []
    assert stored_digests(write_rows(rows)) == {"a" * 64: "0" * 64, "b" * 64: "1" * 64}
    assert [row.stored for row in rows] == [True, True, False]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(write_rows([ROW])[:-1], id="line break cut off"),
        pytest.param(write_rows([ROW])[:-2], id="a digit cut off"),
        pytest.param(write_rows([ROW]).replace(" 12", " 1_2"), id="EXT-16 1_2"),
        pytest.param(write_rows([ROW]).replace(" 12", " +12"), id="sign"),
        pytest.param(write_rows([ROW]).replace(" 12", " -12"), id="negative"),
        pytest.param(write_rows([ROW]).replace(" 12", " 0"), id="no token"),
        pytest.param(write_rows([ROW]).replace(" 12", " 012"), id="leading zero"),
        pytest.param(write_rows([ROW]).replace(" 12", " ١٢"), id="other digits"),
        pytest.param(write_rows([ROW]).replace(" 12", " 12 x"), id="more"),
        pytest.param(write_rows([ROW]).replace("a", "g"), id="no hex"),
        pytest.param(write_rows([ROW]).replace("a", "A"), id="upper case"),
        pytest.param("\n" + write_rows([ROW]), id="blank line"),
        pytest.param(f"{'a' * 64} - 12\n", id="refused for no reason"),
        pytest.param(f"{'a' * 64} {'0' * 64} 12 all-zero\n", id="stored and refused"),
        pytest.param(f"{'a' * 64} - 12 all zero\n", id="two reasons"),
        pytest.param(write_rows([ROW]).replace("\n", "\r\n"), id="CRLF"),
    ],
)
def test_a_line_that_is_not_exactly_a_row_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rows\.txt:1"):
        read_rows(text)


def test_shards_lie_by_digest(tmp_path: Path) -> None:
    digest = "ab" + "0" * 62
    assert shard_path(tmp_path, digest) == tmp_path / "states" / "ab" / f"{digest}.safetensors"


def test_training_is_given_each_row_or_told_that_it_has_no_states(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    keys = [letter * 64 for letter in "abc"]
    shard = ShardRecord("5" * 64, 1, ((keys[0], 0, 6, "0" * 64), (keys[2], 6, 4, "2" * 64)))
    ledger.add_shard(shard)
    ledger.close()
    listed = [
        StateRow(keys[0], "0" * 64, 6),
        StateRow(keys[1], "", 3, "not-finite"),
        StateRow(keys[2], "2" * 64, 4),
    ]
    (tmp_path / ROWS).write_text(write_rows(listed), "utf-8")
    assert placed_rows(tmp_path, tmp_path / FILE, 3) == [
        (keys[0], Place("5" * 64, 0, 6, "0" * 64)),
        (keys[1], None),
        (keys[2], Place("5" * 64, 6, 4, "2" * 64)),
    ]
    with pytest.raises(StageFailed, match="the states list 3 rows, the rows file has 4"):
        placed_rows(tmp_path, tmp_path / FILE, 4)
    for other in (replace(listed[0], digest="9" * 64), StateRow("d" * 64, "0" * 64, 6)):
        (tmp_path / ROWS).write_text(write_rows([other]), "utf-8")
        with pytest.raises(StageFailed, match=f"row {other.key[:12]} is not in the state store"):
            placed_rows(tmp_path, tmp_path / FILE, 1)
