"""`verify`: every byte is compared, what is damaged is named, and only that is made again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project
from keeping import Store, flip, state

from kimi_eagle.artifacts.digests import stat_of
from kimi_eagle.registry.store import Registry
from kimi_eagle.states.layout import ROWS, read_rows, shard_path

REUSED = {"head": "reused", "rows": "reused", "vocab": "reused"}


@pytest.fixture
def head(first_run: tuple[Project, Answer]) -> str:
    return str(first_run[1].outputs["head"]["head"])


def verdicts(answer: Answer) -> dict[str, dict[str, Any]]:
    return {item["digest"]: item for item in answer.json["artifacts"]}


def test_what_is_whole_is_said_to_be_and_when(made: Project, head: str) -> None:
    before = made.cli("show", head, "--json").json
    assert before["verified_at"] is None
    answer = made.cli("verify", "--all", "--json")
    assert answer.code == 0
    assert answer.json["status"] == "whole"
    assert {item["kind"] for item in answer.json["artifacts"]} == {"head", "rows", "vocab"}
    assert all(
        item["state"] == "present" and not item["damages"] for item in answer.json["artifacts"]
    )
    assert answer.json["bytes"] == sum(item["bytes"] for item in answer.json["artifacts"])
    after = made.cli("show", head, "--json").json
    assert after["verified_at"] > before["created_at"]


def _swap_for_link(path: Path) -> None:
    other = path.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


HARMS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "flip": (flip, "model.safetensors", "altered"),
    "delete": (Path.unlink, "model.safetensors", "missing"),
    "truncate": (lambda path: os.truncate(path, 100), "model.safetensors", "truncated"),
    "lengthen": (lambda path: os.truncate(path, 10**6), "model.safetensors", "longer"),
    "add": (lambda path: path.with_name("more").write_text("x"), "more", "extra"),
    "add a folder": (lambda path: path.with_name("deep").mkdir(), "deep", "extra"),
    "link": (_swap_for_link, "model.safetensors", "altered"),
    "remove": (lambda path: shutil.rmtree(path.parent), "", "missing"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_is_named_marked_and_made_again(
    made: Project, head: str, first_run: tuple[Project, Answer], harm: str
) -> None:
    # RUN-14
    do, name, what = HARMS[harm]
    folder = made.root / "objects" / head[:2] / head
    do(folder / "model.safetensors")
    answer = made.cli("verify", "--all", "--json")
    assert answer.code == 1
    assert answer.json["status"] == "damaged"
    found = verdicts(answer)
    (damage,) = found[head]["damages"]
    path = (folder / name).relative_to(made.root).as_posix()
    assert (damage["path"], damage["what"]) == (path, what)
    assert [digest for digest, item in found.items() if item["damages"]] == [head]
    assert state(made, head) == "missing"
    assert made.cli("show", head, "--json").json["verified_at"] is None
    again = made.submit()
    assert again.dispositions == {**REUSED, "head": "executed"}
    assert again.outputs == first_run[1].outputs
    assert state(made, head) == "present"
    assert made.cli("verify", head).code == 0


def test_a_byte_that_turned_under_an_unchanged_stat_is_found_and_then_known(
    made: Project, head: str
) -> None:
    """Rot below the file system: what is remembered of the file still says that it is whole."""
    path = made.root / "objects" / head[:2] / head / "model.safetensors"
    flip(path)
    registry = Registry(made.root)
    good = dict(registry.artifact(head).files)["model.safetensors"][0]  # type: ignore[union-attr]
    registry.put_file_stats({str(path): (stat_of(path), good)})
    registry.close()
    assert made.plan()["head"]["action"] == "reuse", "the stat alone tells nothing"
    assert made.cli("verify", head).code == 1
    planned = made.plan()
    assert planned["head"]["action"] == "run"
    assert "model.safetensors was altered" in planned["head"]["reasons"][0]
    assert made.submit().dispositions == {**REUSED, "head": "executed"}


def test_what_was_mended_is_present_again_once_it_is_verified(made: Project, head: str) -> None:
    path = made.root / "objects" / head[:2] / head / "config.json"
    flip(path)
    assert made.cli("verify", head).code == 1
    flip(path)
    (reason,) = made.plan()["head"]["reasons"]
    assert "found damaged by `kimi-eagle verify`" in reason
    assert made.cli("verify", head).code == 0
    assert state(made, head) == "present"
    assert made.submit().dispositions == REUSED


def test_a_hash_names_an_artifact_or_all_that_a_run_came_by(
    made: Project, first_run: tuple[Project, Answer], head: str
) -> None:
    run = first_run[1].json["run_id"]
    answer = made.cli("verify", run[:6], "--json")
    assert {item["kind"] for item in answer.json["artifacts"]} == {"head", "rows", "vocab"}
    assert list(verdicts(made.cli("verify", head[:10], "--json"))) == [head]
    (line,) = made.cli("verify", head).out.splitlines()
    assert line.split("\t")[:3] == [head, "head", "present"]


def test_what_cannot_be_verified_is_bad_input(made: Project, head: str, tmp_path: Path) -> None:
    lineage = made.cli("lineage", head, "--json").json
    outside = next(node["digest"] for node in lineage["nodes"] if node["kind"] == "verifier")
    for arguments, says in (
        ((outside,), "came from outside"),
        (("f" * 64,), "starts with fff"),
        (("ab",), "too short"),
        ((), "one of the arguments"),
        ((head, "--all"), "not allowed with"),
    ):
        answer = made.cli("verify", *arguments)
        assert answer.code == 2, arguments
        assert says in answer.err
    answer = made.cli("verify", "--all", root=tmp_path / "nowhere")
    assert answer.code == 2
    assert "no registry" in answer.err
    assert not (tmp_path / "nowhere").exists()


def test_a_shard_is_read_once_for_all_that_need_it_and_named_to_each(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = store.shard("a", "b"), store.shard("c")
    one, other, whole = store.states("a", "c"), store.states("b"), store.states("c")
    answer = store.cli("verify", "--all", "--json")
    assert answer.code == 0
    assert answer.json["files"] == 3 * 2 + 2
    flip(shard_path(tmp_path, first))
    found = verdicts(store.cli("verify", "--all", "--json"))
    for digest in (one, other):
        (damage,) = found[digest]["damages"]
        assert damage["path"].endswith(f"{first}.safetensors")
        assert damage["what"] == "altered"
    assert found[whole]["damages"] == []
    shard_path(tmp_path, second).unlink()
    assert [
        d["what"] for d in verdicts(store.cli("verify", whole, "--json"))[whole]["damages"]
    ] == ["missing"]
    store.close()


def test_rows_that_are_not_stored_or_are_stored_otherwise_are_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shard = store.shard("a", "b")
    states = store.states("a", "b", "z")
    with store.registry.database.write() as connection:
        connection.execute("update state_rows set digest = ? where start = 0", ("0" * 64,))
    answer = store.cli("verify", states, "--json")
    assert answer.code == 1
    details = [item["detail"] for item in verdicts(answer)[states]["damages"]]
    assert details == ["1 of 3 rows are not stored", "1 of 3 rows are stored as other bytes"]
    assert shard in store.shards()
    store.close()


def test_a_damaged_shard_that_nothing_needs_is_named_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shard = store.shard("a")
    os.truncate(shard_path(tmp_path, shard), 0)
    answer = store.cli("verify", "--all", "--json")
    assert answer.code == 1
    assert [item["what"] for item in answer.json["stray"]] == ["truncated"]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["flip", "delete", "truncate"])
def test_only_the_rows_of_a_damaged_shard_are_extracted_again(
    extracted: Project, first_extraction: tuple[Project, Answer], harm: str
) -> None:
    # RUN-14
    states = first_extraction[1].outputs["states"]["states"]
    shards = sorted((extracted.root / "states").glob("*/*.safetensors"))
    assert len(shards) > 2
    victim = shards[1]
    registry = Registry(extracted.root)
    with registry.database.read() as connection:
        (rows,) = connection.execute(
            "select count(*) from state_rows where shard = ?", (victim.stem,)
        ).fetchone()
    registry.close()
    if harm == "flip":
        flip(victim)
    elif harm == "delete":
        victim.unlink()
    else:
        victim.chmod(0o644)
        os.truncate(victim, 1000)
    answer = extracted.cli("verify", "--all", "--json")
    assert answer.code == 1
    assert victim.name in verdicts(answer)[states]["damages"][0]["path"]
    assert state(extracted, states) == "missing"
    again = extracted.submit()
    assert again.dispositions == {**REUSED, "states": "executed"}
    assert again.json["stages"][-1]["metrics"]["rows_extracted"] == rows
    made = again.outputs["states"]["states"]
    assert extracted.cli("verify", made).code == 0
    listed = read_rows((extracted.object_of(again, "states") / ROWS).read_text("utf-8"))
    assert len(listed) == again.json["stages"][-1]["metrics"]["rows"]
    assert extracted.submit().dispositions == {**REUSED, "states": "reused"}
