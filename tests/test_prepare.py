"""The stage `prepare` as a whole: nothing lost uncounted, the same rows in any number of processes,
memory and time that do not grow with a record."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cases import case_json, demo_verifier, material
from conftest import DEMO, Project
from material_chats import conversations

from kimi_eagle.job import EVENTS, EventWriter, Given, Job, StageFailed
from kimi_eagle.rows.conversations import Rejected, read_conversation
from kimi_eagle.rows.encode import Encoder
from kimi_eagle.rows.render import Renderer, Row, cut
from kimi_eagle.rows.sources import read_records
from kimi_eagle.rows.table import FILE, Rows, RowsWriter, load_rows, save_rows
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.prepare import rendering
from kimi_eagle.stages.prepare import run as prepare
from kimi_eagle.stages.prepare.parallel import in_order
from kimi_eagle.stages.prepare.spec import PrepareParams

CHATS = DEMO / "chats.jsonl"


def _run(
    folder: Path, *sources: Path, verifier: Path | None = None, **params: Any
) -> tuple[dict[str, Any], Path]:
    """Metrics, and the folder of the artifact."""
    folder.mkdir()
    tokenizer = str(verifier or demo_verifier())
    given = PrepareParams.model_validate(
        {
            "kind": "prepare",
            "sources": [{"path": str(path)} for path in sources],
            "max_length": 512,
            **params,
        },
        strict=False,
    )
    inputs = {f"sources.{i}": (Given("", str(path)),) for i, path in enumerate(sources)}
    job = Job(
        stage="rows",
        kind="prepare",
        params={},
        inputs={"tokenizer": (Given("", tokenizer),), **inputs},
        verifier=tokenizer,
        folder=str(folder),
        root=str(folder),
        registry="",
    )
    metrics = prepare.run(Context(job, given, EventWriter(folder / EVENTS)))
    return metrics, folder / "out" / "rows"


def _source(path: Path, *conversations: list[dict[str, str]]) -> Path:
    lines = (json.dumps({"messages": turns}) + "\n" for turns in conversations)
    path.write_text("".join(lines), "utf-8")
    return path


def _turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_the_rows_are_the_same_in_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "CHUNK_ITEMS", 7)
    found = [_run(tmp_path / str(n), CHATS, workers=n) for n in (1, 3)]
    files = [{path.name: path.read_bytes() for path in out.iterdir()} for _, out in found]
    assert files[0].keys() == {FILE, "report.json"}
    assert files[0] == files[1]
    assert found[0][0] == found[1][0]
    # Every row is proven, and each supervises a turn or more.
    metrics = found[0][0]
    assert metrics["prompts_proven"] == metrics["turns"] >= metrics["rows"] > 100


def test_every_record_is_a_row_or_is_counted(tmp_path: Path) -> None:
    source = _source(
        tmp_path / "chats.jsonl",
        _turns("q", "a"),
        _turns("q <|im_end|>", "a [EOS] <|im_user|>"),
        _turns("q", "a"),
        _turns("q"),
        _turns("q", "", "r", "b"),
        _turns("word " * 600, "a"),
        _turns("q", "word " * 600),
    )
    metrics, out = _run(tmp_path / "job", source, val_ratio=0.0)
    assert metrics["buckets"] == {
        "kept": 3,
        "duplicate": 1,
        "empty_assistant": 1,
        "no_assistant_turn": 1,
        "too_long_no_supervision": 1,
    }
    assert load_rows(out).record.tolist() == [1, 2, 7]


def test_nothing_left_to_learn_is_an_error(tmp_path: Path) -> None:  # PRE-13, PRE-02
    source = _source(tmp_path / "chats.jsonl", _turns("word " * 600, "a"))
    with pytest.raises(StageFailed, match="1 left out, too_long_no_supervision"):
        _run(tmp_path / "job", source)


def test_a_huge_record_takes_no_time_and_leaves_the_others(tmp_path: Path) -> None:  # PRE-24
    size = case_json("chat/huge_line.RECIPE.json")["generator"]
    assert "12_000_000" in size
    huge = 12_000_000
    source = _source(
        tmp_path / "chats.jsonl",
        _turns("q1", "a1"),
        _turns("x" * huge, "y"),
        _turns("q2", "z" * huge),
        _turns("x" * huge, "y", "more", "z"),
        _turns("q3", "a3"),
    )
    started = time.process_time()
    metrics, out = _run(tmp_path / "job", source, val_ratio=0.0, workers=1)
    assert time.process_time() - started < 15  # 45 s for one such line, when it was encoded
    assert load_rows(out).record.tolist() == [1, 5]
    assert metrics["buckets"] == {"kept": 2, "too_long": 1, "too_long_no_supervision": 2}
    notes = (tmp_path / "job" / EVENTS).read_text("utf-8")
    assert "chats.jsonl:3 (12000010 characters; 1000000 are encoded)" in notes
    assert "chats.jsonl:2 (more than 512 tokens)" in notes


@pytest.mark.parametrize("limit", [20, 60, 150])
def test_a_limit_changes_no_row_that_is_kept(limit: int) -> None:
    def kept(renderer: Renderer) -> list[Row]:
        found = []
        for record in islice(read_records(CHATS), 60):
            for row in renderer.rows(read_conversation(record.value, "messages")):
                if any(row.loss_mask[:limit]):
                    found.append(cut(row, limit))
        return [Row(row.token_ids, row.loss_mask, ()) for row in found]

    tokenizer = load_tokenizer(demo_verifier())
    assert kept(Renderer(tokenizer, limit=limit)) == kept(Renderer(tokenizer))


def test_a_prompt_that_cannot_be_proven_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stretch that comes out otherwise than within the whole, by a fault put in here."""
    tokenizer = load_tokenizer(demo_verifier())
    conversation = read_conversation({"messages": _turns("one", "1", "two", "2")}, "messages")
    assert len(Renderer(tokenizer).rows(conversation)) == 1
    real = Encoder._plain
    monkeypatch.setattr(
        Encoder, "_plain", lambda self, text: real(self, text) + [5] * (text == "one")
    )
    with pytest.raises(Rejected, match="prompt_not_proven"):
        Renderer(tokenizer).rows(conversation)


def test_rows_that_are_written_as_they_come_are_the_file_of_all_at_once(tmp_path: Path) -> None:
    ids, masks = [[5, 6, 7], [8], []], [[0, 1, 1], [1], []]
    split, source, record = [0, 1, 0], [0, 1, 1], [3, 9, 10]
    file, line = [0, 2, 1], [1, 8, 4]
    whole, scratch = tmp_path / "whole", tmp_path / "scratch"
    whole.mkdir()
    scratch.mkdir()
    save_rows(whole, ids, masks, split, source, record, file, line)
    with RowsWriter(scratch) as writer:
        for row in zip(ids, masks, file, line, record, source, strict=True):
            writer.add(*row)
        assert (len(writer), writer.tokens) == (3, 4)
        writer.finish(tmp_path, split)
    assert (tmp_path / FILE).read_bytes() == (whole / FILE).read_bytes()
    found: Rows = load_rows(tmp_path)
    assert [found.ids(row).tolist() for row in range(3)] == ids


def test_work_is_taken_in_order_and_no_further_ahead_than_needed() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            read.append(number)
            yield number

    def work(number: int) -> tuple[int, int]:
        time.sleep(0.003 * (number % 3))
        return number * number, os.getpid()

    found = []
    for number, (square, process) in in_order(items(), work, 2):
        assert len(read) <= number + 6
        assert square == number * number
        found.append(process)
    assert len(found) == 50
    assert os.getpid() not in found
    assert len(set(found)) == 2


def test_one_process_or_one_item_forks_nothing() -> None:
    here = os.getpid()
    assert [pid for _, pid in in_order([1, 2, 3], lambda _: os.getpid(), 1)] == [here] * 3
    assert [pid for _, pid in in_order([1], lambda _: os.getpid(), 4)] == [here]


def test_an_error_in_a_process_is_raised_and_a_killed_one_ends_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> int:
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 0"):
        list(in_order(range(9), fail, 2))

    def die(*_: Any) -> int:
        os._exit(9)

    with pytest.raises(BrokenProcessPool):
        list(in_order(range(9), die, 2))
    monkeypatch.setattr(rendering, "CHUNK_ITEMS", 7)
    monkeypatch.setattr(rendering, "rows", die)
    with pytest.raises(StageFailed, match="set `workers` lower"):
        _run(tmp_path / "job", CHATS, workers=2)


def test_what_makes_other_rows_runs_again_and_what_does_not_ends_there(made: Project) -> None:
    """PRE-33, and PRE-25: the limit, a byte of the template or of the tokenizer; and the same
    data, compressed, of which the rows are the same and nothing below runs."""

    def runs() -> set[str]:
        return {name for name, stage in made.plan().items() if stage["action"] != "reuse"}

    assert runs() == set()
    manifest = made.manifest.read_text("utf-8")
    made.write(manifest.replace("max_length: 512", "max_length: 511"))
    assert "rows" in runs()
    made.write(manifest)
    for name in ("chat_template.jinja", "tokenizer.json"):
        path = made.folder / "verifier" / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        assert "rows" in runs()
        path.write_bytes(before)
    more = made.folder / "verifier" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("x")
    assert "rows" in runs()
    (more / "tool_use.jinja").unlink()
    packed = made.folder / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress(made.chats.read_bytes()))
    made.write(manifest.replace("path: chats.jsonl", "path: chats.jsonl.gz"))
    answer = made.submit()
    assert answer.code == 0, answer.err
    assert answer.dispositions["rows"] == "executed"
    assert answer.dispositions["vocab"] == "reused"


@pytest.mark.slow
def test_every_conversation_of_the_material_is_rows_or_is_counted(tmp_path: Path) -> None:
    """With Kimi's own vocabulary and template, from `tiktoken.model` alone: every prompt proven."""
    source = tmp_path / "material.jsonl"
    records = list(conversations(material("chat")))
    assert len(records) > 14_000
    # All that has tools, reasoning or turns, and some of what is a question and an answer.
    chosen = [item for n, item in enumerate(records) if len(item["messages"]) > 2 or n % 40 == 0]
    lines = (json.dumps(item) + "\n" for item in chosen)
    source.write_text("".join(lines), "utf-8")
    metrics, out = _run(
        tmp_path / "job", source, verifier=material("kimi-k2.5"), max_length=2048, val_ratio=0.1
    )
    rejects = {name: count for name, count in metrics["buckets"].items() if name != "kept"}
    assert "prompt_not_proven" not in rejects
    assert set(rejects) <= {"duplicate", "think_token_in_text", "too_long_no_supervision"}
    assert metrics["prompts_proven"] == metrics["turns"] > metrics["rows"] > 1_000
    # A conversation is lost as a whole only where it is counted; a long one loses rows alone.
    assert metrics["conversations"] + sum(rejects.values()) == len(chosen)
    assert all(load_rows(out).mask(row).any() for row in range(metrics["rows"]))
