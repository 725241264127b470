"""`gc`: what may go by policy goes, is not forgotten, and no run loses what it holds."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import HEAD, Answer, Project, halted_worker_of, kill, wait_for
from keeping import RUN, Store, killed_evicting, state

from kimi_eagle.artifacts.locks import Lock, gate
from kimi_eagle.commands.gc import age, count, size
from kimi_eagle.runner import ALIVE

REUSED = {"head": "reused", "rows": "reused", "vocab": "reused"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "runs")
    yield found
    found.close()


@pytest.fixture
def outputs(first_run: tuple[Project, Answer]) -> dict[str, str]:
    """The digest of each stage's artifact."""
    return {stage: next(iter(found.values())) for stage, found in first_run[1].outputs.items()}


def gone(answer: Answer) -> set[str]:
    assert answer.code == 0, answer.err
    return {item["digest"] for item in answer.json["evicted"]}


def tree(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


# What is evicted is not forgotten


def test_a_dry_run_says_what_would_go_and_removes_nothing(
    made: Project, outputs: dict[str, str]
) -> None:
    before = tree(made.root)
    answer = made.cli("gc", "--keep-runs", "0", "--json")
    assert gone(answer) == set(outputs.values())
    found = answer.json
    assert found["status"] == "dry-run"
    assert found["bytes_freed"] == sum(item["bytes"] for item in found["evicted"])
    assert found["make_again"]["seconds"] > 0
    assert found["make_again"]["cpu_seconds"] > 0
    assert tree(made.root) - before <= {".locks/gate"}
    assert "Nothing was removed" in made.cli("gc", "--keep-runs", "0").err
    assert {state(made, digest) for digest in outputs.values()} == {"present"}


def test_without_a_policy_no_artifact_goes(made: Project, outputs: dict[str, str]) -> None:
    assert gone(made.cli("gc", "--yes", "--json")) == set()
    assert made.objects() == set(outputs.values())


def test_what_was_made_of_an_evicted_artifact_is_still_reused(
    made: Project, outputs: dict[str, str]
) -> None:
    for stage in ("vocab", "head"):
        assert made.cli("pin", outputs[stage]).code == 0
    before = made.cli("lineage", outputs["vocab"], "--json").json
    answer = made.cli("gc", "--keep-runs", "0", "--yes", "--json")
    assert answer.json["status"] == "done"
    assert gone(answer) == {outputs["rows"]}
    assert answer.json["pinned"] == 2
    assert made.objects() == {outputs["vocab"], outputs["head"]}
    assert state(made, outputs["rows"]) == "evicted"
    after = made.cli("lineage", outputs["vocab"], "--json").json
    assert after["edges"] == before["edges"]
    planned = made.plan()["rows"]
    assert planned["action"] == "reuse"
    assert any("was evicted (by `kimi-eagle gc`" in reason for reason in planned["reasons"])
    assert "gone from the disk, but nothing needs it" in planned["reasons"]
    again = made.submit()
    assert again.dispositions == REUSED
    assert again.outputs["rows"]["rows"] == outputs["rows"]
    answer = made.cli("verify", "--all", "--json")
    assert answer.code == 0
    assert {item["digest"]: item["state"] for item in answer.json["artifacts"]}[
        outputs["rows"]
    ] == "evicted"


@pytest.mark.slow
def test_an_evicted_artifact_is_made_again_where_it_is_needed(
    made: Project, outputs: dict[str, str]
) -> None:
    assert gone(made.cli("gc", "--keep-runs", "0", "--yes", "--json")) == set(outputs.values())
    assert made.objects() == set()
    answer = made.submit("--set", "stages.vocab.size=64")
    assert answer.dispositions == dict.fromkeys(REUSED, "executed")
    assert answer.outputs["rows"]["rows"] == outputs["rows"]
    assert state(made, outputs["rows"]) == "present"
    assert state(made, outputs["vocab"]) == "evicted", "nothing needed it"
    assert made.cli("verify", "--all").code == 0


@pytest.mark.slow
def test_hidden_states_go_first_and_come_back_with_all_that_they_need(
    extracted: Project, first_extraction: tuple[Project, Answer], outputs: dict[str, str]
) -> None:
    states = first_extraction[1].outputs["states"]["states"]
    before = extracted.cli("gc", "--json").json["store_bytes"]
    answer = extracted.cli("gc", "--max-bytes", str(before - 1), "--yes", "--json")
    assert gone(answer) == {states}
    assert answer.json["shards"]
    assert list((extracted.root / "states").glob("*/*")) == []
    planned = extracted.plan()
    assert {name: stage["action"] for name, stage in planned.items()} == {
        **dict.fromkeys(REUSED, "reuse"),
        "states": "run",
    }
    assert gone(extracted.cli("gc", "--keep-runs", "0", "--yes", "--json")) == set(outputs.values())
    again = extracted.submit()
    assert set(again.dispositions.values()) == {"executed"}
    assert again.json["stages"][-1]["metrics"]["rows_extracted"] == 10
    assert extracted.cli("verify", "--all").code == 0


# What a policy lets go


def test_what_the_last_runs_used_stays(store: Store) -> None:
    first = store.make("rows", {"a": "1"})
    second = store.make("rows", {"a": "2"})
    third = store.make("vocab", {"a": "3"}, (first,))
    assert gone(store.cli("gc", "--keep-runs", "1", "--json")) == {first, second}
    assert gone(store.cli("gc", "--keep-runs", "2", "--json")) == {first}
    assert gone(store.cli("gc", "--keep-runs", "3", "--json")) == set()
    assert gone(store.cli("gc", "--keep-runs", "0", "--json")) == {first, second, third}


def test_what_a_late_run_reused_stays(made: Project, outputs: dict[str, str]) -> None:
    made.write(made.manifest.read_text("utf-8").split("  rows:")[0])
    assert made.submit().dispositions == {"head": "reused"}
    answer = made.cli("gc", "--keep-runs", "1", "--json")
    assert gone(answer) == {outputs["rows"], outputs["vocab"]}


def backdate(store: Store, digest: str, moment: str) -> None:
    """Make the execution that made an artifact one of long ago."""
    with store.registry.database.write() as connection:
        connection.execute(
            "update executions set started_at = ?, ended_at = ? where id in "
            "(select execution from execution_outputs where digest = ?)",
            (moment, moment, digest),
        )


def test_age_counts_from_the_last_use(store: Store) -> None:
    old, used, new = (store.make("rows", {"a": text}) for text in "123")
    taker = store.make("vocab", {"a": "4"}, (used,))
    for digest in (old, used):
        backdate(store, digest, "2020-01-01T00:00:00.000000Z")
    assert gone(store.cli("gc", "--older-than", "30d", "--json")) == {old}
    assert gone(store.cli("gc", "--older-than", "0m", "--json")) == {old, used, new, taker}
    assert gone(store.cli("gc", "--older-than", "30d", "--keep-runs", "4", "--json")) == set()


def test_the_least_recently_used_goes_until_the_rest_fits(store: Store) -> None:
    digests = [store.make("rows", {"a": text * 1000}) for text in "123"]
    for limit, going in (("3kB", 0), ("2999", 1), ("2kB", 1), ("1.5 kB", 2), ("0", 3)):
        answer = store.cli("gc", "--max-bytes", limit, "--json")
        assert [item["digest"] for item in answer.json["evicted"]] == digests[:going]


def test_the_cost_is_what_the_makings_recorded(store: Store) -> None:
    store.make("rows", {"a": "1"}, seconds=60, resources={"cpu_seconds": 100.5})
    answer = store.cli("gc", "--keep-runs", "0", "--json").json["make_again"]
    assert answer == {"seconds": 60.0, "cpu_seconds": 100.5, "gpu_hours": None}
    assert "1:00 of stages, 1:40 of CPU" in store.cli("gc", "--keep-runs", "0").err
    store.make("states", {"a": "1"}, seconds=30, resources={"gpu_seconds": 7200})
    answer = store.cli("gc", "--keep-runs", "0", "--json").json["make_again"]
    assert answer == {"seconds": 90.0, "cpu_seconds": 100.5, "gpu_hours": 2.0}


def test_results_stay_unless_asked_for_and_never_those_of_what_is_pinned(store: Store) -> None:
    kept, other = (store.make("checkpoint", {"a": text}) for text in "12")
    score = store.make("evaluation", {"a": "3"}, (kept,))
    release = store.make("release", {"a": "4"}, (kept, score))
    worse = store.make("evaluation", {"a": "5"}, (other,))
    rows = store.make("rows", {"a": "6"})
    assert gone(store.cli("gc", "--keep-runs", "0", "--json")) == {rows}
    assert store.cli("pin", kept, "--note", "the good one").code == 0
    answer = store.cli("gc", "--keep-runs", "0", "--results", "--yes", "--json")
    assert gone(answer) == {other, worse, rows}
    assert all(store.folder(digest).is_dir() for digest in (kept, score, release))


def test_what_has_no_recipe_stays(store: Store) -> None:
    rows = store.make("rows", {"a": "1"})
    with store.registry.database.write() as connection:
        connection.execute("update executions set key = null")
    assert gone(store.cli("gc", "--keep-runs", "0", "--json")) == set()
    assert store.folder(rows).is_dir()


# Hidden states


def test_a_shard_goes_when_no_kept_artifact_lists_one_of_its_rows(store: Store) -> None:
    first, shared, last = store.shard("a", "b"), store.shard("c", "d"), store.shard("e")
    old, new = store.states("a", "b", "c"), store.states("d", "e")
    answer = store.cli("gc", "--keep-runs", "1", "--yes", "--json")
    assert gone(answer) == {old}
    assert [item["digest"] for item in answer.json["shards"]] == [first]
    assert store.shards() == {shared, last}
    assert not list((store.root / "states").glob(f"*/{first}*"))
    assert store.cli("verify", new).code == 0
    assert store.cli("registry", "check").code == 0


def test_a_pinned_artifact_keeps_its_shards(store: Store) -> None:
    shard = store.shard("a")
    states = store.states("a")
    store.cli("pin", states)
    assert gone(store.cli("gc", "--keep-runs", "0", "--yes", "--json")) == set()
    assert store.shards() == {shard}


def test_rows_of_an_extraction_that_did_not_end_stay_as_long_as_its_run_counts(
    store: Store,
) -> None:
    store.registry.begin_run("a" * 12, **RUN)
    shard = store.shard("a")
    store.registry.end_run("a" * 12, "interrupted")
    assert store.cli("gc", "--keep-runs", "1", "--json").json["shards"] == []
    assert store.cli("gc", "--older-than", "1d", "--json").json["shards"] == []
    answer = store.cli("gc", "--keep-runs", "0", "--json").json["shards"]
    assert [item["digest"] for item in answer] == [shard]


# What runs hold


def test_what_a_living_run_has_taken_stays(made: Project, outputs: dict[str, str]) -> None:
    text = made.manifest.read_text("utf-8").replace(
        "  vocab:", "  small: {kind: vocab, rows: rows, size: 64}\n  vocab:"
    )
    made.write(text.replace("  head: {kind: head}\n", ""))
    process = made.start_submit()
    worker = halted_worker_of(made.root)
    answer = made.cli("gc", "--keep-runs", "0", "--yes", "--json")
    kill(worker, signal.SIGCONT)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert gone(answer) == {outputs["head"]}
    assert answer.json["held"] == 2
    assert Answer(0, out, err).dispositions["small"] == "executed"
    assert made.objects() >= {outputs["rows"], outputs["vocab"]}


def test_no_shard_goes_while_a_living_run_extracts(store: Store) -> None:
    shard = store.shard("a")
    states = store.states("a")
    run = "b" * 12
    store.registry.begin_run(run, **RUN)
    store.registry.begin_execution(run, "states", "extract", "k", {}, {}, [], "attempt", {})
    with Lock(store.root / run / ALIVE):
        answer = store.cli("gc", "--keep-runs", "0", "--yes", "--json")
        assert gone(answer) == {states}
        assert answer.json["shards"] == []
        assert store.shards() == {shard}
    answer = store.cli("gc", "--keep-runs", "0", "--yes", "--json")
    assert [item["digest"] for item in answer.json["shards"]] == [shard], "its run is dead"


def test_it_waits_for_a_run_that_looks_at_the_store(made: Project) -> None:
    with gate(made.root, shared=True):
        process = made.start("gc", "--keep-runs", "0", "--yes", "--json")
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        assert len(made.objects()) == 3
    out, _ = process.communicate()
    assert json.loads(out)["status"] == "done"
    assert made.objects() == set()


def test_a_run_waits_while_things_are_taken_out(made: Project) -> None:
    with gate(made.root, shared=False):
        process = made.start_submit()
        wait_for(lambda: _waits(process.pid), "the run at the gate")
        assert process.poll() is None
    out, err = process.communicate()
    assert Answer(process.returncode, out, err).dispositions == REUSED


@pytest.mark.slow
def test_runs_come_to_their_end_while_everything_is_taken_out_again_and_again(
    made: Project, outputs: dict[str, str]
) -> None:
    made.write(made.manifest.read_text("utf-8").replace("  head: {kind: head}\n", ""))
    for _ in range(2):
        process = made.start_submit()
        while process.poll() is None:
            assert made.cli("gc", "--keep-runs", "0", "--yes").code == 0
        out, err = process.communicate()
        answer = Answer(process.returncode, out, err)
        assert answer.code == 0, err
        assert {name: next(iter(found.values())) for name, found in answer.outputs.items()} == {
            name: outputs[name] for name in ("rows", "vocab")
        }
    assert made.cli("gc", "--keep-runs", "0", "--yes").code == 0
    assert made.objects() == set()
    assert made.cli("registry", "check", "--json").json["problems"] == []


def _waits(pid: int) -> bool:
    """Whether a process waits for a lock on a file."""
    lines = Path("/proc/locks").read_text("utf-8").splitlines()
    return any("-> FLOCK" in line and str(pid) in line.split() for line in lines)


# What nobody needs


def test_leftovers_are_listed_and_removed(made: Project, outputs: dict[str, str]) -> None:
    objects, states = made.root / "objects", made.root / "states" / "ab"
    head = objects / outputs["head"][:2]
    states.mkdir(parents=True)
    left = {
        made.root / ".staging" / "0123456789ab-rows-00000000",
        head / ("0" * 64),
        head / ".record.json.1234",
        states / f"{'ab' * 32}.safetensors",
        states / f"{'cd' * 32}.json",
    }
    for path in left:
        if path.suffix or path.name.startswith("."):
            path.write_bytes(b"12345")
        else:
            path.mkdir(parents=True)
            (path / "file").write_bytes(b"12345")
    answer = made.cli("gc", "--json")
    assert {Path(item["path"]) for item in answer.json["leftovers"]} == left
    assert answer.json["bytes_freed"] == 5 * len(left)
    assert all(path.exists() for path in left)
    assert made.cli("gc", "--yes").code == 0
    assert not any(path.exists() for path in left)
    assert list((made.root / ".staging").iterdir()) == []
    assert made.objects() == set(outputs.values())
    assert made.submit().dispositions == REUSED


def test_an_artifact_that_only_its_own_record_names_is_left_and_told_of(
    made: Project, outputs: dict[str, str], tmp_path: Path
) -> None:
    """A registry that was begun anew knows nothing: what is whole must outlive that."""
    for path in made.root.glob("registry.sqlite*"):
        path.unlink()
    shutil.move(made.manifest, tmp_path / "kept.yaml")
    made.write("version: 1\nname: x\nverifier: {path: verifier}\nstages: {head: {kind: head}}\n")
    made.submit()
    answer = made.cli("gc", "--yes", "--json")
    names = {Path(path).name for path in answer.json["unknown"]}
    assert names == {outputs["rows"], outputs["vocab"]}
    assert answer.json["leftovers"] == []
    assert made.objects() == set(outputs.values())


def test_a_living_runs_unrecorded_work_is_no_leftover(store: Store) -> None:
    run = "c" * 12
    orphan = store.root / "objects" / "00" / ("0" * 64)
    staged = store.root / ".staging" / f"{run}-rows-00000000"
    for path in (orphan, staged):
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    store.registry.begin_run(run, **RUN)
    with Lock(store.root / run / ALIVE):
        assert store.cli("gc", "--yes", "--json").json["leftovers"] == []
    assert len(store.cli("gc", "--yes", "--json").json["leftovers"]) == 2


def test_a_collection_that_is_killed_loses_nothing_that_was_to_stay(
    made: Project, outputs: dict[str, str]
) -> None:
    assert made.cli("pin", outputs["vocab"]).code == 0
    process = made.start("gc", "--keep-runs", "0", "--yes")
    wait_for(lambda: process.poll() is not None or _evicted(made), "the first eviction")
    process.kill()
    process.communicate()
    assert made.cli("gc", "--keep-runs", "0", "--yes").code == 0
    assert made.objects() == {outputs["vocab"]}
    assert list((made.root / ".staging").iterdir()) == []
    assert made.cli("verify", "--all").code == 0


def test_what_it_had_begun_to_evict_when_it_was_killed_goes_with_the_next_run(
    extracted: Project,
) -> None:
    project = extracted
    before = project.objects()
    killed_evicting(project, "gc", "--keep-runs", "0", "--yes")
    assert project.objects() == before
    assert {state(project, digest) for digest in before} == {"evicted"}
    project.write(HEAD)
    run = "f" * 12
    (project.root / run).mkdir()
    with Lock(project.root / run / ALIVE):
        assert project.submit().code == 0
        assert project.objects() == before, "another may be about to record the same"
    answer = project.submit()
    assert project.objects() == set(answer.outputs["head"].values())
    assert not list((project.root / "states").rglob("*.safetensors"))
    assert list((project.root / ".staging").iterdir()) == []
    assert project.cli("verify", "--all").code == 0
    assert project.cli("registry", "check").code == 0


def _evicted(project: Project) -> bool:
    return '"evicted"' in _text(project.root / "keeping.ndjson")


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


# Pins


def test_a_pin_is_shown_and_ends_when_it_is_taken_off(
    made: Project, outputs: dict[str, str]
) -> None:
    head = outputs["head"]
    answer = made.cli("pin", head[:12], "--note", "for the paper", "--json")
    assert answer.code == 0
    assert answer.json["digest"] == head
    assert made.cli("show", head, "--json").json["pinned"]["note"] == "for the paper"
    assert "for the paper" in made.cli("show", head).out
    assert made.cli("pin", head, "--note", "and more").code == 0
    assert made.cli("show", head, "--json").json["pinned"]["note"] == "and more"
    assert head not in gone(made.cli("gc", "--keep-runs", "0", "--json"))
    assert made.cli("unpin", head).code == 0
    assert made.cli("show", head, "--json").json["pinned"] is None
    assert head in gone(made.cli("gc", "--keep-runs", "0", "--json"))


def test_what_cannot_be_pinned_is_bad_input(
    made: Project, outputs: dict[str, str], first_run: tuple[Project, Answer], tmp_path: Path
) -> None:
    nodes = made.cli("lineage", outputs["head"], "--json").json["nodes"]
    outside = next(node["digest"] for node in nodes if node["kind"] == "verifier")
    for arguments, says in (
        (("pin", first_run[1].json["run_id"]), "is a run"),
        (("pin", outside), "came from outside"),
        (("pin", "f" * 64), "starts with fff"),
        (("unpin", outputs["head"]), "is not pinned"),
    ):
        answer = made.cli(*arguments)
        assert answer.code == 2
        assert says in answer.err
    assert made.cli("pin", outputs["head"], root=tmp_path / "nowhere").code == 2
    assert not (tmp_path / "nowhere").exists()


# How ages and sizes are written


@pytest.mark.parametrize(
    ("text", "days"), [("30d", 30), ("2w", 14), ("12h", 0.5), ("90m", 0.0625), ("1.5d", 1.5)]
)
def test_ages(text: str, days: float) -> None:
    assert age(text) == timedelta(days=days)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("500GB", 5 * 10**11),
        ("2TiB", 2**41),
        ("1.5 kB", 1500),
        ("7b", 7),
        ("1gib", 2**30),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((age, text) for text in ("30", "d", "-1d", "30 d", "1y", "٣d", "9" * 30 + "w")),
        *((size, text) for text in ("", "GB", "-1", "5 apples", "1e9", "٥")),
        *((count, text) for text in ("", "-1", "1.5", "٥", "x")),
    ],
)
def test_what_is_no_age_size_or_number_is_refused(read: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


def test_answers_of_the_verifier_go_when_they_are_old(store: Store) -> None:
    folder = store.root / "answers" / ("a" * 64)
    folder.mkdir(parents=True)
    for name, days in (("old", 40), ("new", 1)):
        path = folder / f"{name}.safetensors"
        path.write_bytes(b"answers")
        moment = time.time() - days * 86400
        os.utime(path, (moment, moment))
    store.cli("gc", "--yes")
    assert len(list(folder.iterdir())) == 2
    answer = store.cli("gc", "--older-than", "30d", "--yes", "--json")
    (leftover,) = answer.json["leftovers"]
    assert leftover["path"].endswith("old.safetensors")
    assert [path.name for path in folder.iterdir()] == ["new.safetensors"]
