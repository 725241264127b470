"""Identity: golden digests (a change here invalidates every cache), and what is equal."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_eagle import identity

CONTRACT = {
    "layers": [2, 4, 5, 8],
    "hidden_size": 8,
    "dtype": "bfloat16",
    "numerics": "vllm",
    "convention": "embeddings-are-0/last-before-final-norm",
}


def test_golden_canonical_bytes() -> None:
    assert identity.canonical({"b": [1, 2.5, True, None], "a": "é"}) == (
        b'{"a":"\xc3\xa9","b":[1,2.5,true,null]}'
    )


def test_golden_document() -> None:
    assert identity.digest_document("probe/1", {"b": [1, 2.5, True, None], "a": "é"}) == (
        "4aafafd76b49a11e5f93c6dac23de8c1e9b34069902d95e2b40d0c62205ca449"
    )


def test_golden_bytes_are_blake3() -> None:
    assert identity.digest_bytes(b"") == (
        "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )


def test_golden_tree() -> None:
    files = {"rows.safetensors": ("0" * 64, 10), "report.json": ("1" * 64, 2)}
    assert identity.digest_tree("rows", files) == (
        "ea6e362a369184b0b54fa6d2d7287395fecb6c6c61e3a1252cb691a61311b994"
    )


def test_golden_stage_key() -> None:
    key, document = identity.stage_key(
        "train", 1, {"lr": 1e-5, "epochs": 3}, {"head": ["a" * 64], "states": ["b" * 64]}
    )
    assert key == "2ebe08f0366f931979132958528ca3425c81587b8ec5ded5dbad849e71364f62"
    assert identity.digest_document("stage/1", document) == key


def test_golden_row_key() -> None:
    assert identity.row_key("c" * 64, CONTRACT, bytes([1, 0, 0, 0])) == (
        "e702847d22a920a2d1397f53ee42e0f4182b3e0550cc55faf94c42d4f50910c4"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="key order"),
        pytest.param(1e-5, 0.00001, id="MAN-01 spelling of a float"),
        pytest.param(1e-5, float("1E-5"), id="MAN-01 upper case"),
        pytest.param(-0.0, 0.0, id="sign of zero"),
        pytest.param({"a": [-0.0]}, {"a": [0.0]}, id="sign of zero, nested"),
        pytest.param((1, (2,)), [1, [2]], id="tuple and list"),
    ],
)
def test_equal_values_have_equal_bytes(one: Any, other: Any) -> None:
    assert identity.canonical(one) == identity.canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (1, "1"),
        ("é", "e\u0301"),
        (None, "null"),
        ([], {}),
        ([[1], 2], [1, [2]]),
        ({"a": None}, {}),
        (0.1, 0.1 + 2**-56),
        (2**53, 2**53 + 1),
        ([1, 2], [2, 1]),
        ("a\nb", "a\\nb"),
    ],
)
def test_different_values_have_different_bytes(one: Any, other: Any) -> None:
    assert identity.canonical(one) != identity.canonical(other)


class Colour(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [b"x", {1}, Path("x"), object(), 1j, Colour.RED, Number.ONE, {1: 2}, {None: 1}, {True: 1}],
    ids=lambda value: type(value).__name__,
)
def test_unknown_types_are_refused_at_any_depth(value: Any) -> None:
    with pytest.raises(TypeError, match=r"\$\.a\.1"):
        identity.canonical({"a": [0, value]})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "\ud83d"])
def test_values_without_identity_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="has no identity"):
        identity.canonical({"a": [value]})


def test_a_lone_surrogate_in_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="has no identity"):
        identity.canonical({"\udcb2": 1})


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=12,
)


def _rebuilt(value: Any) -> Any:
    """The same value, with keys in reverse, tuples for lists, and floats read back from text."""
    if isinstance(value, dict):
        return {key: _rebuilt(item) for key, item in reversed(value.items())}
    if isinstance(value, list):
        return tuple(map(_rebuilt, value))
    return float(f"{value:.17e}") if isinstance(value, float) else value


@given(_values)
def test_bytes_do_not_depend_on_how_a_value_was_built(value: Any) -> None:
    assert identity.canonical(_rebuilt(value)) == identity.canonical(value)


@given(_values)
def test_bytes_read_back_as_the_value(value: Any) -> None:
    assert json.loads(identity.canonical(value)) == value


@given(_values, _values)
def test_equal_bytes_mean_equal_values(one: Any, other: Any) -> None:
    if identity.canonical(one) == identity.canonical(other):
        assert one == other


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "export"},
        {"code_version": 2},
        {"parameters": {"lr": 2e-5}},
        {"parameters": {"lr": 1e-5, "epochs": 3}},
        {"inputs": {"head": ["b" * 64]}},
        {"inputs": {"states": ["a" * 64]}},
        {"inputs": {"head": ["a" * 64, "a" * 64]}},
    ],
    ids=str,
)
def test_everything_in_a_stage_key_changes_it(changed: dict[str, Any]) -> None:
    given_ = {
        "kind": "train",
        "code_version": 1,
        "parameters": {"lr": 1e-5},
        "inputs": {"head": ["a" * 64]},
    }
    assert identity.stage_key(**given_)[0] != identity.stage_key(**{**given_, **changed})[0]


@pytest.mark.parametrize("field", CONTRACT)
def test_every_field_of_the_contract_changes_a_row_key(field: str) -> None:
    other = {**CONTRACT, field: "another"}
    assert identity.row_key("c" * 64, CONTRACT, b"") != identity.row_key("c" * 64, other, b"")


def test_tag_and_value_cannot_be_confused() -> None:
    assert identity.digest_document("a/1", 1) != identity.digest_document("a/2", 1)


@pytest.mark.parametrize("size", [0, 1, 1 << 17], ids=["empty", "one", "mapped"])
def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert identity.digest_file(path) == identity.digest_bytes(b"x" * size)


def test_tree_digest_ignores_order_and_sees_every_part() -> None:
    files = {"a": ("0" * 64, 1), "b": ("1" * 64, 2)}
    known = identity.digest_tree("rows", files)
    assert known == identity.digest_tree("rows", dict(reversed(files.items())))
    others = [
        identity.digest_tree("vocab", files),
        identity.digest_tree("rows", {**files, "b": ("1" * 64, 3)}),
        identity.digest_tree("rows", {**files, "b": ("2" * 64, 2)}),
        identity.digest_tree("rows", {"a": ("0" * 64, 1), "c": ("1" * 64, 2)}),
    ]
    assert len({known, *others}) == 5
