"""The registry's upkeep: checked, made again from records, backed up in use, restored whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cases import case_input
from conftest import HEAD, Answer, Project, halted_worker_of, kill, worker_of
from keeping import RUN, Store, dump, flip, state

from kimi_eagle import recovery
from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.manifest.load import load
from kimi_eagle.outcome import RunOutcome
from kimi_eagle.progress import PlainReporter
from kimi_eagle.registry.maintenance import TABLES
from kimi_eagle.registry.schema import FILE
from kimi_eagle.registry.store import Registry
from kimi_eagle.registry.tables import metadata
from kimi_eagle.runner import ALIVE, Runner

REUSED = {"head": "reused", "rows": "reused", "vocab": "reused"}


@pytest.fixture
def outputs(first_run: tuple[Project, Answer]) -> dict[str, str]:
    return {stage: next(iter(found.values())) for stage, found in first_run[1].outputs.items()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "runs")
    yield found
    found.close()


def aside(answer: Answer) -> Path:
    return Path(answer.json["aside"])


# Made again from records


def test_every_column_is_read_back() -> None:
    found = {
        "runs": set(recovery._RUN),
        "executions": set(recovery._EXECUTION),
        "artifacts": {*recovery._ARTIFACT, "state", "verified_at"},
    }
    for name, columns in found.items():
        assert columns == {column.name for column in metadata.tables[name].columns}, name
    assert {*TABLES, "file_stats"} == set(metadata.tables)


def test_reuse_pins_evictions_and_verifications_are_read_back(
    made: Project, outputs: dict[str, str]
) -> None:
    made.submit()
    for arguments in (
        ("pin", outputs["vocab"], "--note", "ünïcode"),
        ("verify", "--all"),
        ("gc", "--keep-runs", "0", "--yes"),
    ):
        assert made.cli(*arguments).code == 0
    before = dump(made.root / FILE)
    assert before["pins"]
    assert {row[5] for row in before["artifacts"]} == {"present", "evicted", "external"}
    assert made.cli("registry", "rebuild").code == 0
    assert dump(made.root / FILE) == before


def live_through_everything(project: Project, outputs: dict[str, str]) -> None:
    """Runs that reuse, fail, are killed and are interrupted; pins, damage, eviction, repair."""
    assert project.submit().dispositions == REUSED
    index = project.folder / "verifier" / "model.safetensors.index.json"
    text = index.read_text("utf-8")
    index.write_text(text.replace("lm_head", "lm_haed"), "utf-8")
    assert project.submit().code == 1
    index.write_text(text, "utf-8")
    for number in (signal.SIGKILL, signal.SIGTERM):
        config = project.folder / "verifier" / "generation_config.json"
        config.write_text(config.read_text("utf-8") + "\n", "utf-8")
        process = project.start_submit()
        worker_of(project.root)
        process.send_signal(number)
        process.communicate()
    for arguments in (
        ("pin", outputs["vocab"], "--note", "ünïcode"),
        ("pin", outputs["head"]),
        ("unpin", outputs["head"]),
        ("verify", "--all"),
        ("gc", "--keep-runs", "0", "--yes"),
    ):
        assert project.cli(*arguments).code == 0
    assert state(project, outputs["rows"]) == "evicted"


@pytest.mark.slow
def test_a_registry_made_again_is_the_one_that_was(made: Project, outputs: dict[str, str]) -> None:
    live_through_everything(made, outputs)
    last = made.submit("--set", "stages.rows.max_length=511")
    assert set(last.dispositions.values()) == {"executed"}
    flip(made.object_of(last, "head") / "model.safetensors")
    assert made.cli("verify", "--all").code == 1
    path = made.root / FILE
    before = dump(path)
    assert {row[4] for row in before["runs"]} == {"done", "failed", "interrupted"}
    assert {row[6] for row in before["executions"]} == {
        "executed",
        "reused",
        "failed",
        "interrupted",
    }
    assert {row[5] for row in before["artifacts"]} == {"present", "missing", "evicted", "external"}
    assert len(before["pins"]) == 1
    assert before["artifact_members"]
    answer = made.cli("registry", "rebuild", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["status"] == "rebuilt"
    assert answer.json["rows"] == {table: len(rows) for table, rows in before.items()}
    after = dump(path)
    for table, rows in before.items():
        assert after[table] == rows, table
    assert dump(aside(answer)) == before, "the one before is kept"
    assert made.cli("registry", "check", "--json").json["status"] == "ok"


@pytest.mark.slow
def test_shards_and_rows_are_made_again_too(extracted: Project) -> None:
    extracted.submit()
    before = dump(extracted.root / FILE)
    assert len(before["state_shards"]) > 2
    assert len(before["state_rows"]) == 10
    assert extracted.cli("registry", "rebuild").code == 0
    assert dump(extracted.root / FILE) == before
    assert extracted.submit().dispositions == {**REUSED, "states": "reused"}


@pytest.mark.parametrize("harm", ["delete", "overwrite", "cut"])
def test_a_lost_registry_is_made_again_and_nothing_is_executed_anew(
    made: Project, harm: str
) -> None:
    path = made.root / FILE
    before = dump(path)
    if harm == "delete":
        for side in made.root.glob(f"{FILE}*"):
            side.unlink()
    elif harm == "overwrite":
        path.write_bytes(b"not a database" * 1000)
    else:
        os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    if harm != "delete":
        harmed = path.read_bytes()
    answer = made.cli("registry", "rebuild", "--json")
    assert answer.code == 0, answer.err
    assert dump(path) == before
    if harm == "delete":
        assert answer.json["aside"] is None
    else:
        assert aside(answer).read_bytes() == harmed
    assert made.submit().dispositions == REUSED


def test_runs_of_a_registry_that_was_begun_anew_find_their_place_beside_the_others(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    """Both registries numbered their runs and executions from one."""
    made.submit()
    for side in made.root.glob(f"{FILE}*"):
        side.unlink()
    made.write(HEAD)
    assert made.submit().dispositions == {"head": "executed"}
    made.submit()
    answer = made.cli("registry", "rebuild", "--json")
    assert answer.code == 0, answer.err
    found = dump(made.root / FILE)
    assert sorted(row[1] for row in found["runs"]) == [1, 2, 3, 4]
    assert len({row[0] for row in found["executions"]}) == len(found["executions"]) == 8
    runs = made.cli("runs", "--json").json["runs"]
    assert runs[-1]["id"] == first_run[1].json["run_id"]
    times = [run["started_at"] for run in runs]
    assert times == sorted(times, reverse=True)
    by_id = {row[0]: row for row in found["executions"]}
    for row in found["executions"]:
        if row[6] == "reused":
            assert by_id[row[7]][4] == row[4], "it is of the same key"
            assert by_id[row[7]][6] == "executed"


def test_artifacts_outlive_the_folder_of_the_run_that_made_them(
    made: Project, first_run: tuple[Project, Answer], outputs: dict[str, str]
) -> None:
    made.submit()
    shutil.rmtree(made.root / first_run[1].json["run_id"])
    answer = made.cli("registry", "rebuild", "--json")
    assert answer.code == 0, answer.err
    shown = made.cli("show", outputs["vocab"], "--json").json
    assert shown["state"] == "present"
    assert shown["producers"][0]["run"] == first_run[1].json["run_id"]
    nodes = made.cli("lineage", outputs["vocab"], "--up", "--json").json["nodes"]
    assert outputs["rows"] in {node["digest"] for node in nodes}
    assert made.submit().dispositions == REUSED
    assert made.cli("registry", "check").code == 0


def test_a_damaged_record_is_named_and_the_rest_is_made_again(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    run = first_run[1].json["run_id"]
    second = made.submit().json["run_id"]
    (made.root / second / "run.json").write_text('{"id": ', "utf-8")
    (made.root / run / "stages" / "head.json").write_text("[]", "utf-8")
    answer = made.cli("registry", "rebuild", "--json")
    assert answer.code == 1
    assert any("run.json" in problem for problem in answer.json["problems"])
    assert any("head.json" in problem for problem in answer.json["problems"])
    assert [item["id"] for item in made.cli("runs", "--json").json["runs"]] == [run]
    assert {name: stage["action"] for name, stage in made.plan().items()} == {
        "head": "run",
        "rows": "reuse",
        "vocab": "reuse",
    }


def test_nothing_is_made_of_a_folder_without_records(tmp_path: Path, made: Project) -> None:
    answer = made.cli("registry", "rebuild", root=tmp_path / "empty")
    assert answer.code == 2
    assert "no records" in answer.err
    assert not (tmp_path / "empty" / FILE).exists()


def test_no_registry_takes_the_place_of_one_that_a_run_writes(head_project: Project) -> None:
    process = head_project.start_submit()
    worker = halted_worker_of(head_project.root)
    assert head_project.cli("registry", "backup", str(head_project.folder / "copy")).code == 0
    for arguments in (("rebuild",), ("restore", str(head_project.folder / "copy"))):
        answer = head_project.cli("registry", *arguments)
        assert answer.code == 2
        assert "is alive" in answer.err
    kill(worker, signal.SIGCONT)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert Answer(0, out, err).dispositions == {"head": "executed"}
    assert list(head_project.root.glob(f"{FILE}.before*")) == []


def test_a_run_that_had_the_old_registry_open_is_recorded_in_the_new_one(made: Project) -> None:
    runner = Runner(made.root, PlainReporter())
    assert runner.registry.running_runs() == []
    assert made.cli("registry", "rebuild").code == 0
    outcome: RunOutcome = runner.submit(load(made.manifest, []))
    runner.close()
    listed = made.cli("runs", "--json").json["runs"]
    assert listed[0]["id"] == outcome.run_id
    assert len(listed) == 2


def test_a_record_that_cannot_be_written_stops_no_run(
    made: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimi_eagle import books

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(books, "write_text", full)
    answer = made.submit()
    assert answer.code == 0
    assert "No space left on device" in answer.err
    assert "registry backup" in answer.err


# Backed up


def _writing(registry: Registry, stop: threading.Event, done: list[str]) -> None:
    while not stop.is_set():
        run = f"{len(done):012x}"
        registry.begin_run(run, **RUN)
        registry.end_run(run, "done")
        done.append(run)


def test_a_backup_is_whole_while_another_writes(store: Store, tmp_path: Path) -> None:
    stop, done = threading.Event(), list[str]()
    writer = threading.Thread(target=_writing, args=(store.registry, stop, done))
    writer.start()
    try:
        while len(done) < 20:
            pass
        for number in range(5):
            before = len(done)
            target = tmp_path / f"backup-{number}"
            answer = store.cli("registry", "backup", str(target), "--json")
            after = len(done)
            assert answer.code == 0, answer.err
            with closing(sqlite3.connect(target)) as copy:
                assert copy.execute("pragma integrity_check").fetchone() == ("ok",)
                assert copy.execute("pragma journal_mode").fetchone() == ("delete",)
                (count,) = copy.execute("select count(*) from runs").fetchone()
            assert before <= count <= after + 1
            assert answer.json["runs"] == count
            assert answer.json["bytes"] == target.stat().st_size
    finally:
        stop.set()
        writer.join()
    assert len(done) > 20
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_backup_overwrites_nothing_unless_told_to(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    target.write_text("mine")
    answer = store.cli("registry", "backup", str(target))
    assert answer.code == 2
    assert "--force" in answer.err
    assert target.read_text() == "mine"
    side = tmp_path / "backup-wal"
    side.write_text("of another")
    assert store.cli("registry", "backup", str(target), "--force").code == 0
    assert not side.exists(), "SQLite would take it for a part of the backup"
    assert dump(target) == dump(store.file)
    answer = store.cli("registry", "backup", str(store.file), "--force")
    assert answer.code == 2
    assert "the registry itself" in answer.err
    assert store.cli("registry", "backup", str(tmp_path / "no" / "folder")).code == 2
    assert Project(tmp_path / "none").cli("registry", "backup", str(tmp_path / "b")).code == 2


# Restored


def killed_writer(path: Path) -> None:
    """Commit a run and die, so that it is in the log alone."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from keeping import RUN\n"
        "from kimi_eagle.registry.store import Registry\n"
        "Registry(Path(sys.argv[1])).begin_run('f' * 12, **RUN)\n"
        "os.kill(os.getpid(), 9)"
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, str(path.parent), here])
    assert path.with_name(path.name + "-wal").stat().st_size


def test_a_restored_registry_is_the_backup_and_no_stale_log(store: Store, tmp_path: Path) -> None:
    # REG-04
    store.make("rows", {"a": "1"})
    backup = tmp_path / "backup"
    assert store.cli("registry", "backup", str(backup)).code == 0
    kept = dump(backup)
    store.close()
    killed_writer(store.file)
    answer = store.cli("registry", "restore", str(backup), "--json")
    assert answer.code == 0, answer.err
    assert [path.name for path in store.root.glob(f"{FILE}-*")] == []
    assert dump(store.file) == kept
    assert store.cli("registry", "check", "--json").json["status"] == "ok"
    assert "f" * 12 in {row[0] for row in dump(aside(answer))["runs"]}, "the old one is whole"
    assert "f" * 12 not in {row[0] for row in dump(store.file)["runs"]}


def test_a_log_whose_registry_is_gone_is_not_picked_up(store: Store, tmp_path: Path) -> None:
    # REG-04
    backup = tmp_path / "backup"
    assert store.cli("registry", "backup", str(backup)).code == 0
    store.close()
    killed_writer(store.file)
    store.file.unlink()
    answer = store.cli("registry", "restore", str(backup))
    assert answer.code == 0, answer.err
    assert dump(store.file)["runs"] == []
    assert [path.name for path in store.root.glob(f"{FILE}-*")] == []


def test_an_unreadable_registry_goes_aside_with_its_log(store: Store, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    assert store.cli("registry", "backup", str(backup)).code == 0
    store.close()
    killed_writer(store.file)
    log = store.file.with_name(f"{FILE}-wal").read_bytes()
    store.file.write_bytes(b"\xff" * 8192)
    answer = store.cli("registry", "restore", str(backup), "--json")
    assert answer.code == 0, answer.err
    assert aside(answer).read_bytes() == b"\xff" * 8192
    assert aside(answer).with_name(aside(answer).name + "-wal").read_bytes() == log
    assert dump(store.file) == dump(backup)


def refused(store: Store, backup: Path, says: str) -> None:
    """A restore is refused, and neither file is touched."""
    before = backup.read_bytes(), dump(store.file)
    answer = store.cli("registry", "restore", str(backup))
    assert answer.code == 2
    assert says in answer.err
    assert (backup.read_bytes(), dump(store.file)) == before
    assert list(store.root.glob(f"*{FILE}.*")) == []


def test_a_newer_backup_is_refused_and_left_as_it_is(store: Store, tmp_path: Path) -> None:
    # REG-08
    store.make("rows", {"a": "1"})
    backup = tmp_path / "newer"
    with closing(sqlite3.connect(backup)) as connection:
        connection.execute("create table alembic_version (version_num text)")
        connection.execute("insert into alembic_version values ('ffffffffffff')")
        connection.commit()
    refused(store, backup, "newer version")
    public = tmp_path / "future.db"
    shutil.copyfile(case_input("registry/future_schema.db"), public)
    refused(store, public, str(public))


def test_what_is_no_whole_backup_is_refused(store: Store, tmp_path: Path) -> None:
    for text in "123456":
        store.make("rows", {"a": text * 1000})
    backup = tmp_path / "backup"
    assert store.cli("registry", "backup", str(backup)).code == 0
    whole = backup.read_bytes()
    side = tmp_path / "backup-wal"
    side.write_bytes(b"of whom?")
    refused(store, backup, "lies beside")
    side.unlink()
    backup.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    refused(store, backup, "is damaged")
    backup.write_bytes(whole[: len(whole) // 2 // 4096 * 4096])
    refused(store, backup, str(backup))
    backup.write_bytes(b"")
    refused(store, backup, "holds no registry")
    backup.write_bytes(b"not a database" * 100)
    refused(store, backup, str(backup))
    answer = store.cli("registry", "restore", str(tmp_path / "nowhere"))
    assert answer.code == 2
    assert "nowhere: No such file" in answer.err


def test_a_backup_is_restored_where_there_is_no_registry(store: Store, tmp_path: Path) -> None:
    store.make("rows", {"a": "1"})
    backup = tmp_path / "backup"
    assert store.cli("registry", "backup", str(backup)).code == 0
    fresh = Project(tmp_path / "fresh")
    answer = fresh.cli("registry", "restore", str(backup), "--json")
    assert answer.code == 0, answer.err
    assert answer.json["aside"] is None
    assert dump(fresh.root / FILE) == dump(store.file)


# Checked


def problems(store: Store) -> list[str]:
    answer = store.cli("registry", "check", "--json")
    assert answer.code == (1 if answer.json["problems"] else 0)
    return list(answer.json["problems"])


def test_a_check_finds_what_disk_and_registry_do_not_agree_on(store: Store) -> None:
    rows = store.make("rows", {"a": "1"})
    shard, cut = store.shard("a"), store.shard("b")
    assert problems(store) == []
    shutil.rmtree(store.folder(rows))
    next((store.root / "states").glob(f"*/{shard}.safetensors")).unlink()
    os.truncate(next((store.root / "states").glob(f"*/{cut}.safetensors")), 0)
    found = problems(store)
    assert len(found) == 3
    for digest in (rows, shard, cut):
        assert sum(digest in problem for problem in found) == 1


def test_a_check_names_what_only_its_own_record_knows(store: Store) -> None:
    digest = "a" * 64
    folder = store.folder(digest)
    folder.mkdir(parents=True)
    folder.with_suffix(".json").write_text(json.dumps({"made": {"run": "0" * 12}}))
    (problem,) = problems(store)
    assert digest in problem
    assert "registry rebuild" in problem


def test_a_check_tells_of_a_run_without_a_living_process(store: Store) -> None:
    run = "d" * 12
    store.registry.begin_run(run, **RUN)
    with Lock(store.root / run / ALIVE):
        assert store.cli("registry", "check", "--json").json["notes"] == []
    (note,) = store.cli("registry", "check", "--json").json["notes"]
    assert run in note


def test_a_check_finds_damage_and_rows_that_refer_to_nothing(store: Store) -> None:
    store.make("rows", {"a": "1"})
    store.close()
    with closing(sqlite3.connect(store.file)) as connection:
        connection.execute("delete from runs")
        connection.commit()
    (problem,) = problems(store)
    assert "executions refers to a row of runs" in problem
    data = bytearray(store.file.read_bytes())
    data[8192:] = b"\xff" * (len(data) - 8192)
    store.file.write_bytes(data)
    assert problems(store)
    answer = store.cli("registry", "backup", str(store.root / "copy"))
    assert answer.code == 2
    assert "registry rebuild" in answer.err
    assert not (store.root / "copy").exists()


def test_a_check_changes_nothing_and_refuses_what_is_no_registry_of_its_own(
    store: Store, tmp_path: Path
) -> None:
    # REG-08
    store.make("rows", {"a": "1"})
    store.close()
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    assert problems(store) == []
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()} == before
    newer = Project(tmp_path / "newer")
    newer.root.mkdir(parents=True)
    with closing(sqlite3.connect(newer.root / FILE)) as connection:
        connection.execute("create table alembic_version (version_num text)")
        connection.execute("insert into alembic_version values ('ffffffffffff')")
        connection.commit()
    bytes_before = (newer.root / FILE).read_bytes()
    for arguments in (("check",), ("backup", str(tmp_path / "b"))):
        answer = newer.cli("registry", *arguments)
        assert answer.code == 2
        assert "newer version" in answer.err
    assert (newer.root / FILE).read_bytes() == bytes_before
    assert Project(tmp_path / "none").cli("registry", "check").code == 2
