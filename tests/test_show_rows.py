"""`prepare` as a whole, and what `show` says of its rows."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import case_input
from conftest import Answer, Project, new_project
from tokenizers import Tokenizer

from kimi_eagle.identity import digest_file
from kimi_eagle.job import EventWriter, Given, Job, StageFailed
from kimi_eagle.rows.table import load_rows
from kimi_eagle.rows_view import spread
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.prepare.run import run
from kimi_eagle.stages.prepare.spec import PrepareParams

ROWS_ONLY = """\
version: 1
name: rows
verifier: {path: verifier}
stages:
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 512, val_ratio: 0.2}
"""


def _with(**options: str) -> str:
    text = "".join(f", {name}: {value}" for name, value in options.items())
    return ROWS_ONLY.replace("max_length: 512", f"max_length: 512{text}")


def _line(*turns: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]})


BAD = [
    _line(("user", "q"), ("observation", "SECRET"), ("assistant", "a")),
    _line(("user", "q"), ("assistant", " ")),
    '{"messages": ',
]


def _mix(project: Project) -> None:
    """Ten good chats, the first again, and three that are bad."""
    good = project.chats.read_text("utf-8").splitlines()
    project.chats.write_text("\n".join([*good, good[0], *BAD, ""]), "utf-8")


@pytest.fixture
def mixed(project: Project) -> Project:
    _mix(project)
    return project


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Answer]:
    """Rows of the mixed chats, and no head; not to be changed."""
    project = new_project(tmp_path_factory.mktemp("mixed") / "project")
    _mix(project)
    project.write(_with(on_bad_record="skip"))
    answer = project.submit()
    assert answer.code == 0, answer.err
    return project, answer


@pytest.fixture
def rows(first_run: tuple[Project, Answer]) -> str:
    return first_run[1].outputs["rows"]["rows"]


def _prepare(project: Project, folder: str, *sources: Path, **options: Any) -> dict[str, Any]:
    """Run the stage in this process; its metrics. What it makes is in `folder`/out/rows."""
    paths = sources or (project.chats,)
    given = {
        f"sources.{index}": (Given(digest_file(path), str(path), path.name),)
        for index, path in enumerate(paths)
    }
    given["tokenizer"] = (Given("0" * 64, str(project.folder / "verifier")),)
    params = PrepareParams.model_validate_json(
        json.dumps({"kind": "prepare", "sources": [{"path": "x"}] * len(paths), **options})
    )
    at = project.folder / folder
    at.mkdir()
    job = Job("rows", "prepare", {}, given, "", str(at), str(at), "")
    return dict(run(Context(job, params, EventWriter(at / "events.ndjson"))))


BUCKETS = {"kept": 10, "duplicate": 1, "empty_assistant": 1, "unknown_role": 1, "unreadable": 1}


def test_every_record_is_in_a_bucket_that_show_prints_with_a_place(
    mixed_run: tuple[Project, Answer],
) -> None:
    project, answer = mixed_run
    (stage,) = answer.json["stages"]
    assert stage["metrics"]["buckets"] == BUCKETS
    assert stage["metrics"]["records"] == sum(BUCKETS.values()) == 14
    assert stage["metrics"]["rejected"] == 3
    digest = stage["outputs"]["rows"]
    shown = project.cli("show", digest, "--json").json["buckets"]
    assert {name: bucket["records"] for name, bucket in shown.items()} == BUCKETS
    (example,) = shown["unknown_role"]["examples"]
    assert (example["place"], example["detail"]) == ("chats.jsonl:12", "'observation'")
    lines = [line.split("\t") for line in project.cli("show", digest).out.splitlines()]
    table = {line[0]: line[1:] for line in lines if len(line) == 5}
    assert {name: int(line[0]) for name, line in table.items()} == BUCKETS
    assert next(iter(table)) == "kept"
    assert table["duplicate"][3] == "chats.jsonl:11"
    assert table["unreadable"][3].startswith("chats.jsonl:14: not JSON")


def test_a_bad_record_fails_the_stage_at_its_line_and_leaves_nothing(mixed: Project) -> None:
    with pytest.raises(StageFailed, match=rf"{mixed.chats}:14: not JSON"):
        _prepare(mixed, "x")
    assert not (mixed.folder / "x" / "out").exists()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_rejected": 0.2}, "3 of 14 records (21.4%) were left out, max_rejected allows 20.0%"),
        ({"by_reason": {"unknown_role": 0}}, "chats.jsonl:12 ('observation')"),
        ({"by_reason": {"duplicate": 0}}, "1 duplicate, allowed are 0: "),
    ],
)
def test_a_limit_turns_a_surprise_into_an_error(
    mixed: Project, limits: dict[str, Any], says: str
) -> None:
    with pytest.raises(StageFailed, match=re.escape(says)):
        _prepare(mixed, "x", on_bad_record="skip", limits=limits)
    assert not (mixed.folder / "x" / "out").exists()


def test_a_limit_that_holds_changes_nothing(mixed: Project) -> None:
    made = _prepare(mixed, "x", on_bad_record="skip")
    limits = {"max_rejected": 0.3, "by_reason": {"truncated": 0}}
    assert _prepare(mixed, "y", on_bad_record="skip", limits=limits) == made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"limits": "{by_reason: {unknwon_role: 0}}"}, "unknwon_role"),
        ({"limits": "{max_rejected: 2}"}, "must be at most 1"),
        ({"deduplicate": "fuzzy"}, "deduplicate"),
    ],
)
def test_what_is_no_option_is_refused_with_its_place(
    project: Project, options: dict[str, str], says: str
) -> None:
    project.write(_with(**options))
    answer = project.cli("validate", str(project.manifest))
    assert answer.code == 2
    assert f"{project.manifest}:5:" in answer.err
    assert says in answer.err


def test_weights_are_for_all_sources_or_for_none(project: Project) -> None:
    sources = "[{path: chats.jsonl, weight: 1.0}, {path: chats.jsonl}]"
    project.write(ROWS_ONLY.replace("[{path: chats.jsonl}]", sources))
    answer = project.cli("validate", str(project.manifest))
    assert answer.code == 2
    assert "give every source a weight, or none" in answer.err


def test_no_row_left_is_an_error_with_the_reasons(project: Project) -> None:  # PRE-02
    project.chats.write_text("\n".join(BAD[:2]) + "\n", "utf-8")
    with pytest.raises(StageFailed, match=rf"0 supervised tokens; 2 .*{project.chats}:1 \("):
        _prepare(project, "x")


def test_public_cases_of_length_are_counted(project: Project) -> None:  # PRE-13
    made = _prepare(project, "x", case_input("chat/long_prompt.jsonl"), max_length=64, val_ratio=0)
    assert made["buckets"] == {"kept": 1, "too_long_no_supervision": 1}
    table = load_rows(project.folder / "x" / "out" / "rows")
    assert (len(table.ids(0)), int(table.mask(0).sum()) >= 1) == (64, True)
    with pytest.raises(StageFailed, match="2 left out, too_long_no_supervision"):
        _prepare(project, "y", case_input("chat/long_prompt.jsonl"), max_length=2, val_ratio=0)


@pytest.mark.parametrize("name", ["bom.jsonl", "base.jsonl.gz"])
def test_public_forms_of_the_base_file_give_equal_rows(  # PRE-08, PRE-25
    project: Project, name: str
) -> None:
    made = [
        _prepare(project, folder, case_input(f"chat/{file}"))
        for folder, file in (("x", "base.jsonl"), ("y", name))
    ]
    assert made[0] == made[1]
    x, y = (project.folder / folder / "out" / "rows" / "rows.safetensors" for folder in "xy")
    assert x.read_bytes() == y.read_bytes()


def test_neither_name_nor_packing_of_a_source_is_part_of_its_rows(mixed: Project) -> None:
    _prepare(mixed, "x", on_bad_record="skip")
    packed = mixed.folder / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(mixed.chats.read_bytes()))
    _prepare(mixed, "y", packed, on_bad_record="skip")
    for name in ("rows.safetensors", "report.json"):
        x, y = (mixed.folder / folder / "out" / "rows" / name for folder in "xy")
        assert x.read_bytes() == y.read_bytes(), name


def test_equal_conversations_are_on_one_side_when_they_are_kept(project: Project) -> None:
    text = project.chats.read_text("utf-8")
    project.chats.write_text(text * 2, "utf-8")
    made = _prepare(project, "x", deduplicate="none", val_ratio=0.3)
    assert made["buckets"] == {"kept": 20}
    assert (made["rows_train"], made["rows_val"]) == (14, 6)
    split = load_rows(project.folder / "x" / "out" / "rows").split.tolist()
    assert split[:10] == split[10:]


def test_a_row_is_shown_as_ids_mask_tokens_and_place(
    first_run: tuple[Project, Answer], rows: str
) -> None:
    project, answer = first_run
    table = load_rows(project.object_of(answer, "rows"))
    found = project.cli("show", rows[:10], "--row", "3", "--json").json
    assert found["token_ids"] == table.ids(3).tolist()
    assert found["loss_mask"] == table.mask(3).tolist()
    assert found["source"] == {"file": "chats.jsonl", "record": 4, "line": 4}
    assert (found["row"], found["rows"]) == (3, len(table))
    assert found["split"] == ("validate" if table.split[3] else "train")
    assert len(found["tokens"]) == len(found["token_ids"])
    tokenizer = Tokenizer.from_file(str(project.folder / "verifier" / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in found["tokens"]] == found["token_ids"]
    text = tokenizer.decode(found["token_ids"], skip_special_tokens=False)
    assert "".join(span["text"] for span in found["spans"]) == text


def test_rows_are_named_by_their_stage_too(first_run: tuple[Project, Answer], rows: str) -> None:
    project, _ = first_run
    by_stage = project.cli("show", "rows", "--row", "3", "--json")
    assert by_stage.code == 0, by_stage.err
    assert by_stage.json == project.cli("show", rows, "--row", "3", "--json").json
    for name in ("head", "no_such_stage"):
        refused = project.cli("show", name, "--row", "0")
        assert (refused.code, f"no artifact starts with {name}" in refused.err) == (2, True)


def test_what_is_supervised_is_marked_in_a_pipe_and_coloured_where_there_is_colour(
    first_run: tuple[Project, Answer], rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = first_run
    record = json.loads(project.chats.read_text("utf-8").splitlines()[0])
    said = record["messages"][-1]["content"]
    plain = project.cli("show", rows, "--row", "0").out
    assert plain.endswith(f"</think>{said}<|im_end|>⟧\n")
    assert plain.count("⟦") == plain.count("⟧") == 1
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = project.cli("show", rows, "--row", "0", "--row", "1").out
    assert f"</think>{said}<|im_end|>\x1b[0m\n" in coloured
    assert "⟦" not in coloured
    assert coloured.count(" supervised; from chats.jsonl:") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--row", "99"], "no row 99: rows"),
        (["--row", "-1"], "no row -1"),
        (["--row", "0", "--tokenizer", "nowhere"], "no tokenizer.json at nowhere"),
        (["--tokenizer", "nowhere"], "say which by --row N"),
    ],
)
def test_a_row_that_cannot_be_shown_is_refused(
    first_run: tuple[Project, Answer], rows: str, arguments: list[str], says: str
) -> None:
    answer = first_run[0].cli("show", rows, *arguments)
    assert (answer.code, says in answer.err) == (2, True), answer.err


def test_a_sample_is_spread_over_all_rows(first_run: tuple[Project, Answer], rows: str) -> None:
    found = first_run[0].cli("show", rows, "--sample", "3", "--json").json
    assert [row["row"] for row in found] == [0, 4, 9]
    assert spread(10, 1) == [0]
    assert spread(3, 9) == [0, 1, 2]


def test_a_report_that_counts_nothing_is_no_obstacle(made: Project) -> None:
    (digest,) = (path.name for path in (made.root / "objects").glob("*/*") if _is_rows(path))
    report = made.root / "objects" / digest[:2] / digest / "report.json"
    report.chmod(0o644)
    for text in ("{", "[]", '{"buckets": {"kept": 3}}'):
        report.write_text(text, "utf-8")
        assert made.cli("show", digest).code == 0
        assert "from chats.jsonl:1\n" in made.cli("show", digest, "--row", "0").out


def _is_rows(path: Path) -> bool:
    return (path / "rows.safetensors").is_file()


def test_rows_alone_have_rows(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    refused = project.cli("show", answer.outputs["head"]["head"], "--row", "0")
    assert (refused.code, "is a head, and --row" in refused.err) == (2, True)


def test_without_the_decoder_the_answer_is_what_to_install(
    first_run: tuple[Project, Answer], rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused = first_run[0].cli("show", rows, "--row", "0")
    assert (refused.code, "`pip install tokenizers`" in refused.err) == (2, True)
    assert "kept" in first_run[0].cli("show", rows).out


def test_the_tokenizer_is_found_in_the_verifier_where_no_head_was_made(
    mixed_run: tuple[Project, Answer],
) -> None:
    digest = mixed_run[1].outputs["rows"]["rows"]
    assert "⟦" in mixed_run[0].cli("show", digest, "--row", "0").out
    # The registry remembers where the manifest was.
    moved = mixed_run[0].folder / "verifier"
    project = mixed_run[0]
    try:
        moved.rename(moved.with_name("elsewhere"))
        refused = project.cli("show", digest, "--row", "0")
        assert (refused.code, "--tokenizer FOLDER" in refused.err) == (2, True)
        elsewhere = str(moved.with_name("elsewhere"))
        given = project.cli("show", digest, "--row", "0", "--tokenizer", elsewhere)
        assert "⟦" in given.out
    finally:
        moved.with_name("elsewhere").rename(moved)


def test_options_enter_the_key_with_defaults_that_mean_what_is_done_without_them(
    project: Project,
) -> None:
    def key(text: str) -> Any:
        project.write(text)
        return project.plan()["rows"]["key"]

    plain = key(ROWS_ONLY)
    assert key(_with(deduplicate="exact", limits="{}", on_bad_record="fail")) == plain
    assert key(_with(deduplicate="none")) != plain
    weighted = ROWS_ONLY.replace("{path: chats.jsonl}", "{path: chats.jsonl, weight: 1.0}")
    assert key(weighted) != plain
    assert key(ROWS_ONLY.replace("{path: chats.jsonl}", "{path: chats.jsonl, limit: 3}")) != plain
