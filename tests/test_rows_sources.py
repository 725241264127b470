"""Chat files: what is read, what is bad and where, whatever wraps the bytes."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cases import case_input
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from kimi_eagle.rows import json_array, sources
from kimi_eagle.rows.sources import BadRecord, Record, loads, read_records

LINES = b'{"a": 1}\n{"a": 2}\n'


def _zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def _parquet(rows: list[Any]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue()


def _arrow(rows: list[Any]) -> bytes:
    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


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
        pytest.param("x.json", LINES, id="lines that are called .json"),
        pytest.param("x.jsonl.zst", _zstd(LINES), id="zstd"),
        pytest.param("x.jsonl.zst", _zstd(LINES[:9]) + _zstd(LINES[9:]), id="2 zst"),
        pytest.param("x.json.zst", _zstd(b'[{"a": 1}, {"a": 2}]'), id="array in zstd"),
        pytest.param("x.parquet", _parquet([{"a": 1}, {"a": 2}]), id="parquet"),
        pytest.param("x.arrow", _arrow([{"a": 1}, {"a": 2}]), id="arrow stream"),
    ],
)
def test_the_same_records_whatever_wraps_them(tmp_path: Path, name: str, data: bytes) -> None:
    found = _read(tmp_path, name, data)
    assert [(record.number, record.value) for record in found] == [(1, {"a": 1}), (2, {"a": 2})]
    assert [record.error for record in found] == [None, None]


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
        ("x.parquet", LINES, "no .parquet file"),
        ("x.jsonl.zst", LINES, "damaged compression"),
        ("x.jsonl.bz2", LINES, "unsupported"),
        ("x.parquet.gz", LINES, "unsupported"),
        ("x.json", b'{\n"a": 1}', "array of records, or one record a line: not JSON"),
        ("x.json", b"3", "array of records"),
        ("x.json", b"", "array of records"),
        ("x.parquet", _parquet([{"a": 1}])[:-1], "no .parquet file"),
        ("x.arrow", LINES, "no .arrow file"),
        ("x.jsonl.gz", LINES, "damaged compression"),
        ("x.jsonl.gz", gzip.compress(LINES)[:10] + b"\xff" * 30, "damaged compression"),
        ("x.jsonl.xz", LINES, "damaged compression"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_whole_is_refused(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    with pytest.raises(BadRecord, match=says):
        _read(tmp_path, name, data)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("x.jsonl.gz", gzip.compress(LINES * 9)[:-4], "truncated"),
        ("x.jsonl.xz", lzma.compress(LINES * 9)[:-8], "truncated"),
        ("x.jsonl.gz", gzip.compress(LINES * 9) + b"\x1f\x8b\xff", "truncated"),
        ("x.jsonl.gz", gzip.compress(LINES * 9)[:-8] + b"\0" * 8, "unreadable"),
        ("x.json.xz", lzma.compress(b"[" + b'{"a": 1}, {"a": 2},' * 9)[:-8], "truncated"),
        ("x.jsonl", LINES * 9 + b'{"a": 1', "truncated"),
        ("x.json", b"[" + b'{"a": 1}, {"a": 2},' * 9 + b'{"a": 1', "truncated"),
        ("x.json", b"[" + b'{"a": 1}, {"a": 2},' * 9 + b'{"a": "\\', "truncated"),
        ("x.json", b"[" + b'{"a": 1}, {"a": 2},' * 9, "truncated"),
        ("x.json", b"[" + b'{"a": 1}, {"a": 2},' * 9 + b"1", "truncated"),
        ("x.json", b"[" + (b'{"a": 1}, {"a": 2},' * 9)[:-1] + b"] rest", "unreadable"),
    ],
)
def test_a_file_that_was_cut_off_yields_what_is_whole_and_then_an_error(  # PRE-32
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    *whole, last = _read(tmp_path, name, data)
    assert [record.value for record in whole] == [{"a": 1}, {"a": 2}] * 9
    assert (last.number, last.value, last.reason) == (19, None, reason)
    assert last.error


def test_a_last_record_that_is_whole_is_read_although_the_array_has_no_end(tmp_path: Path) -> None:
    first, last = _read(tmp_path, "x.json", b'[\n\n{"a":1}\n')
    assert (first.line, first.value) == (3, {"a": 1})
    assert (last.number, last.reason) == (2, "truncated")


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (b'{"a" 1}', "not JSON"),
        (b'{"a": 1]}', "not JSON"),
        (b'{"a": [1, 2}', "not JSON"),
        (b'{"a": 1}}', "not JSON"),
        (b'{"a": "line\nbreak"}', "not JSON"),
        (b'{"a": 1, "a": 1}', "repeated"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1} {"a": 2}', "Extra data"),
        (b"", "nothing between two commas"),
        (b"[" * 5_000 + b"]" * 5_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_bad_item_of_an_array_spares_the_others(
    tmp_path: Path, item: bytes, says: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", chunk)
    first, bad, last = _read(tmp_path, "x.json", b'[\n{"a":1},\n' + item + b',\n{"a":2}]')
    assert (first.value, last.value) == ({"a": 1}, {"a": 2})
    assert (bad.number, bad.reason) == (2, "unreadable")
    assert bad.error is not None
    assert says in bad.error
    assert (first.line, last.line) == (2, 4 + item.count(b"\n"))


_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.text(st.sampled_from('a"\\[]{},: \n\u00e9\U0001f600'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(_json_values, max_size=6), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans()
)
def test_an_array_read_in_pieces_is_what_the_parser_reads_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[Any],
    chunk: int,
    indent: int | None,
    escaped: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.json"
    path.write_text(json.dumps(items, indent=indent, ensure_ascii=escaped), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK", chunk)
        found = list(read_records(path))
    assert [record.value for record in found] == items
    assert [record.error for record in found] == [None] * len(items)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.dictionaries(st.text(max_size=2), _json_values, max_size=2), min_size=1, max_size=4
    ),
    st.data(),
)
def test_an_array_cut_off_anywhere_yields_its_whole_records_and_one_error(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], data: st.DataObject
) -> None:
    text = json.dumps(items).encode()
    path = tmp_path_factory.getbasetemp() / "cut.json"
    path.write_bytes(text[: data.draw(st.integers(1, len(text) - 1))])
    *whole, last = read_records(path)
    assert [record.value for record in whole] == items[: len(whole)]
    assert (last.value, last.reason) == (None, "truncated")


def test_memory_is_flat_in_the_size_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("w") as file:
        file.write("[")
        for number in range(2000):
            file.write(f"{',' if number else ''}{json.dumps({'a': 'x' * 2000})}")
        file.write("]")
    tracemalloc.start()
    try:
        assert sum(record.error is None for record in read_records(path)) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 3_500_000


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_record_beyond_the_limit_is_left_out_and_the_others_are_not(  # PRE-24
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 1000)
    monkeypatch.setattr(json_array, "MAX_BYTES", 1000)
    records = [b'{"a": 1}', json.dumps({"a": "x" * 5000}).encode(), b'{"a": 2}']
    data = b"\n".join(records) if name == "x.jsonl" else b"[" + b",\n".join(records) + b"]"
    first, large, last = _read(tmp_path, name, data)
    assert (first.value, last.value) == ({"a": 1}, {"a": 2})
    assert (large.line, large.reason, large.value) == (2, "record_too_large", None)


def test_rows_of_a_table_have_a_number_and_no_line(tmp_path: Path) -> None:
    found = _read(tmp_path, "x.parquet", _parquet([{"a": number} for number in range(300)]))
    assert [record.number for record in found] == list(range(1, 301))
    assert (found[299].value, found[299].in_table) == ({"a": 299}, True)
    assert found[16].place("x.parquet") == "x.parquet (record 17)"


def test_places_for_people() -> None:
    assert Record(17, 17).place("chats.jsonl") == "chats.jsonl:17"
    assert Record(3, 40).place("chats.json") == "chats.json:40 (record 3)"


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


def _public(name: str) -> list[Any]:
    return [record.value for record in read_records(case_input(name))]


@pytest.mark.parametrize("name", ["bom.jsonl", "base.jsonl.gz", "base_remtime.jsonl.gz"])
def test_public_forms_of_the_base_file_are_equal(name: str) -> None:  # PRE-08, PRE-25
    assert _public(f"chat/{name}") == _public("chat/base.jsonl")


def test_public_truncated_file_names_line_10() -> None:  # PRE-32
    *whole, last = read_records(case_input("chat/truncated_last_line.jsonl"))
    assert [record.error for record in whole] == [None] * 9
    assert (last.number, last.error is not None) == (10, True)


@pytest.mark.parametrize("name", ["nan_in_json", "dup_json_keys"])  # PRE-27
def test_public_lax_json_is_bad(name: str) -> None:
    (record,) = read_records(case_input(f"chat/{name}.jsonl"))
    assert record.error is not None
