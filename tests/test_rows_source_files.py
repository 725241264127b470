"""Which files a source's path names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from kimi_eagle.rows.source_files import NoSource, source_files
from kimi_eagle.rows.sources import read_records


def _names(folder: Path, pattern: str = "") -> list[str]:
    found = source_files(folder / pattern)
    return [path.relative_to(folder).as_posix() for path in found]


def _make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_a_folder_names_what_it_holds_at_any_depth_in_order(tmp_path: Path) -> None:
    _make(tmp_path, "b.jsonl", "a/c.parquet", "a/b.json.zst", "README.md", ".git/x.json")
    _make(tmp_path, "dataset_infos.json", ".x.jsonl")
    assert _names(tmp_path) == ["a/b.json.zst", "a/c.parquet", "b.jsonl"]


def test_files_and_globs(tmp_path: Path) -> None:
    _make(tmp_path, "b.jsonl", "a/c.jsonl", "[x].jsonl")
    assert _names(tmp_path, "b.jsonl") == ["b.jsonl"]
    assert _names(tmp_path, "*.jsonl") == ["[x].jsonl", "b.jsonl"]
    assert _names(tmp_path, "**/*.jsonl") == ["[x].jsonl", "a/c.jsonl", "b.jsonl"]
    assert _names(tmp_path, "[x].jsonl") == ["[x].jsonl"]


@pytest.mark.parametrize(
    ("names", "pattern", "says"),
    [
        ([], "x.jsonl", "no file at"),
        (["README.md"], "", "no file of records in"),
        (["a/x.jsonl"], "*", "is not a file"),
        (["x.csv"], "x.csv", "unsupported: .csv"),
        (["x.parquet.gz"], "x.parquet.gz", "unsupported: .gz"),
        (["x"], "x", "unsupported: a file without a suffix"),
        (
            ["train.jsonl", "test.jsonl"],
            "",
            "several splits by the names of its files: test, train",
        ),
        (["data/train-00000-of-00001.parquet", "data/validation-0.parquet"], "", "several splits"),
        (["config.json", "x.jsonl"], "", "is a model's folder"),
    ],
)
def test_what_names_no_source_is_refused(
    tmp_path: Path, names: list[str], pattern: str, says: str
) -> None:
    _make(tmp_path, *names)
    with pytest.raises(NoSource, match=says) as caught:
        source_files(tmp_path / pattern)
    assert caught.value.help


def test_words_that_only_contain_a_split_s_name_are_no_split(tmp_path: Path) -> None:
    _make(tmp_path, "training.jsonl", "latest.jsonl", "train-0.jsonl", "train-1.jsonl")
    assert len(source_files(tmp_path)) == 4


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS = [{"messages": TURNS, "id": number} for number in range(5)]


def test_a_saved_hugging_face_dataset_is_read(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    files = source_files(tmp_path / "saved")
    assert [path.suffix for path in files] == [".arrow"] * 2
    assert [record.value for path in files for record in read_records(path)] == ROWS


def test_the_splits_of_a_saved_dataset_are_named_apart(tmp_path: Path) -> None:
    splits = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(NoSource, match="several splits: test, train"):
        source_files(tmp_path / "saved")
    (path,) = source_files(tmp_path / "saved" / "train")
    assert [record.value for record in read_records(path)] == ROWS


def test_a_saved_dataset_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    state = tmp_path / "saved" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(NoSource, match=r"names gone\.arrow, which is not there"):
        source_files(tmp_path / "saved")
    state.write_text("{")
    with pytest.raises(NoSource, match="does not say which files"):
        source_files(tmp_path / "saved")
    state.write_text(json.dumps({"_data_files": [{"filename": "../outside.arrow"}]}))
    with pytest.raises(NoSource, match="names no file"):
        source_files(tmp_path / "saved")
