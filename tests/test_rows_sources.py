"""Chat files: what is read, what is bad and where, whatever wraps the bytes."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from cases import case_input

from kimi_eagle.rows.sources import BadRecord, Record, loads, read_records

LINES = b'{"a": 1}\n{"a": 2}\n'


def _read(folder: Path, name: str, data: bytes) -> list[Record]:
    path = folder / name
    path.write_bytes(data)
    return list(read_records(path))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param("x.jsonl", LINES, id="plain"),
        pytest.param("x.jsonl", b"\xef\xbb\xbf" + LINES, id="PRE-08 byte-order mark"),
        pytest.param("x.jsonl", LINES.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param("x.jsonl", LINES.rstrip(), id="no last line break"),
        pytest.param("x.jsonl.gz", gzip.compress(LINES), id="PRE-25 gzip"),
        pytest.param("X.JSONL.GZ", gzip.compress(LINES), id="upper case suffix"),
        pytest.param("x.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + LINES), id="mark in gzip"),
        pytest.param("x.jsonl.gz", gzip.compress(LINES[:9]) + gzip.compress(LINES[9:]), id="2 gz"),
        pytest.param("x.jsonl.xz", lzma.compress(LINES), id="xz"),
        pytest.param("x.json", b'\xef\xbb\xbf[{"a": 1}, {"a": 2}]', id="array"),
        pytest.param("x.json.gz", gzip.compress(b'[{"a": 1}, {"a": 2}]'), id="array in gzip"),
    ],
)
def test_the_same_records_whatever_wraps_them(tmp_path: Path, name: str, data: bytes) -> None:
    assert _read(tmp_path, name, data) == [Record(1, {"a": 1}), Record(2, {"a": 2})]


def test_blank_lines_are_no_records_and_keep_the_numbers(tmp_path: Path) -> None:
    assert [r.number for r in _read(tmp_path, "x.jsonl", b'\n{"a":1}\n  \n{"a":2}\n')] == [2, 4]


def test_line_breaks_of_unicode_do_not_end_a_record(tmp_path: Path) -> None:
    text = "one\u2028two\x0bthree\x85"
    data = json.dumps({"a": text}, ensure_ascii=False).encode()
    assert _read(tmp_path, "x.jsonl", data)[0].value == {"a": text}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param(b'{"role":"user","content":"q","content":"Q2"}', "repeated", id="PRE-27 key"),
        pytest.param(b'{"a":{"b":1,"b":1}}', "'b' is repeated", id="PRE-27 nested, same value"),
        pytest.param(b'{"score":NaN}', "NaN", id="PRE-27 NaN"),
        pytest.param(b'{"score":-Infinity}', "-Infinity", id="PRE-27 infinity"),
        pytest.param(b'{"score":1e999}', "too large", id="infinity by overflow"),
        pytest.param(b'{"score":' + b"9" * 5000 + b"}", "digits", id="endless whole number"),
        pytest.param(b'{"a": "cut', "not JSON", id="PRE-32 cut off"),
        pytest.param(b'{"a":1} {"a":2}', "Extra data", id="two on a line"),
        pytest.param(b'{"a":"\xff"}', "not UTF-8 at byte 6", id="not UTF-8"),
        pytest.param('{"a":1}'.encode("utf-16"), "not UTF-8", id="UTF-16"),
        pytest.param(b'{"a":"\x00"}', "not JSON", id="NUL"),
        pytest.param(b"[" * 200_000, "nested too deeply", id="deep"),
    ],
)
def test_a_bad_line_carries_its_error_and_spares_the_others(
    tmp_path: Path, line: bytes, says: str
) -> None:
    first, bad, last = _read(tmp_path, "x.jsonl", b'{"a":1}\n' + line + b'\n{"a":2}\n')
    assert (first.value, last.value) == ({"a": 1}, {"a": 2})
    assert bad.number == 2
    assert bad.value is None
    assert bad.error is not None
    assert says in bad.error


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.csv", LINES, "unsupported"),
        ("x.parquet", LINES, "unsupported"),
        ("x.jsonl.bz2", LINES, "unsupported"),
        ("x.json", LINES, "not JSON"),
        ("x.json", b'{"a": 1}', "array of records"),
        ("x.json", b'[{"a": 1, "a": 2}]', "repeated"),
        ("x.jsonl.gz", LINES, "damaged compression"),
        ("x.jsonl.gz", gzip.compress(LINES * 99)[:-12], "damaged compression"),
        ("x.jsonl.gz", gzip.compress(LINES)[:10] + b"\xff" * 30, "damaged compression"),
        ("x.jsonl.xz", LINES, "damaged compression"),
        ("x.jsonl.xz", lzma.compress(LINES)[:-8], "damaged compression"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_whole_is_refused(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    with pytest.raises(BadRecord, match=says):
        _read(tmp_path, name, data)


def test_a_huge_line_is_read_whole(tmp_path: Path) -> None:  # PRE-24
    huge = json.dumps({"a": "x" * 12_000_000}).encode()
    found = _read(tmp_path, "x.jsonl", huge + b"\n" + LINES)
    assert [len(found[0].value["a"]), *(r.value for r in found[1:])] == [
        12_000_000,
        {"a": 1},
        {"a": 2},
    ]


def test_surrogate_pairs_become_one_character() -> None:  # PRE-21
    assert loads(rb'"\ud83d\ude00"') == "😀"


@pytest.mark.parametrize(
    "text", ["2024-01-01T00:00:00", "2024-01-02", "1e5", "true", "null", "007"]
)
def test_text_stays_text(text: str) -> None:  # PRE-23
    assert loads(json.dumps(text).encode()) == text


def _values(name: str) -> list[Any]:
    return [record.value for record in read_records(case_input(name))]


@pytest.mark.parametrize("name", ["bom.jsonl", "base.jsonl.gz", "base_remtime.jsonl.gz"])
def test_public_forms_of_the_base_file_are_equal(name: str) -> None:  # PRE-08, PRE-25
    assert _values(f"chat/{name}") == _values("chat/base.jsonl")


def test_public_truncated_file_names_line_10() -> None:  # PRE-32
    *whole, last = read_records(case_input("chat/truncated_last_line.jsonl"))
    assert [record.error for record in whole] == [None] * 9
    assert (last.number, last.error is not None) == (10, True)


@pytest.mark.parametrize("name", ["nan_in_json", "dup_json_keys"])  # PRE-27
def test_public_lax_json_is_bad(name: str) -> None:
    (record,) = read_records(case_input(f"chat/{name}.jsonl"))
    assert record.error is not None
