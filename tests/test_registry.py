"""The registry: no writer is lost, no newer database touched, and hashes lead where they should."""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from kimi_eagle.identity import digest_document
from kimi_eagle.records import ArtifactRecord, ShardRecord
from kimi_eagle.registry.engine import engine_of, migrate
from kimi_eagle.registry.schema import (
    FILE,
    REVISION,
    Database,
    RegistryError,
    file_system,
    journal_mode,
    known_revision,
    open_database,
    scripts,
)
from kimi_eagle.registry.store import AmbiguousDigest, Registry, UnknownDigest
from kimi_eagle.registry.tables import metadata

RUN: dict[str, Any] = {
    "name": "test",
    "manifest_digest": "0" * 64,
    "manifest_path": "manifest.yaml",
    "manifest_text": "",
    "resolved": "{}",
    "overrides": "[]",
    "environment": "{}",
    "host": "here",
    "pid": 1,
}


def artifact(name: str, kind: str = "rows", state: str = "present") -> ArtifactRecord:
    return ArtifactRecord(digest_document("test/1", name), kind, 1, {}, state, name)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    found = Registry(tmp_path)
    yield found
    found.close()


def execute(
    registry: Registry, stage: str, inputs: list[ArtifactRecord], output: ArtifactRecord
) -> None:
    """Record one stage of one run, done."""
    run = f"{stage}-run"
    registry.begin_run(run, **RUN)
    members = [artifact(path, "file", "external") for item in inputs for path in item.members]
    execution = registry.begin_execution(
        run, stage, output.kind, stage, {}, {"in": inputs}, members, "attempt", {}
    )
    registry.end_execution(execution, "executed", seconds=1.0, outputs={"out": output})
    registry.end_run(run, "done")


def _record_runs(root: Path, writer: int, count: int, start: Any) -> None:
    start.wait()
    registry = Registry(root)
    for number in range(count):
        registry.begin_run(f"{writer:04d}-{number:04d}", **RUN)
        registry.end_run(f"{writer:04d}-{number:04d}", "done")
    registry.close()


def together(root: Path, writers: int, count: int) -> list[int | None]:
    """Exit codes of processes that all open one registry at once and record runs."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(writers)
    processes = [
        context.Process(target=_record_runs, args=(root, writer, count, start))
        for writer in range(writers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def test_eight_processes_open_a_fresh_registry_and_lose_none_of_400_runs(tmp_path: Path) -> None:
    # REG-01
    root = tmp_path / "not" / "there" / "yet"
    assert together(root, 8, 50) == [0] * 8
    registry = Registry(root)
    found = registry.list_runs()
    assert len(found) == 400
    assert {run.status for run in found} == {"done"}
    with registry.database.read() as connection:
        assert connection.execute("select max(seq) from runs").fetchone()[0] == 400


def test_a_transaction_that_reads_before_it_writes_is_never_refused(tmp_path: Path) -> None:
    # REG-02
    first, second = Registry(tmp_path), Registry(tmp_path)
    other = threading.Thread(target=lambda: second.begin_run("second", **RUN))
    with first.database.write() as connection:
        assert connection.execute("select count(*) from runs").fetchone()[0] == 0
        other.start()
        other.join(0.2)
        assert other.is_alive(), "the second writer waits for the first"
        values = {"id": "first", "kind": "submit", "seq": 1, "status": "done", "started_at": ""}
        columns = {**RUN, **values}
        connection.execute(
            f"insert into runs ({','.join(columns)}) values ({','.join('?' * len(columns))})",
            list(columns.values()),
        )
    other.join(60)
    assert {run.id for run in first.list_runs()} == {"first", "second"}


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/export /mnt/shared nfs4 rw 0 0
//box/share /mnt/my\\040share cifs rw 0 0
tmpfs /mnt/shared/fast tmpfs rw 0 0
user@host: /mnt/home fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "mode"),
    [
        ("/mnt/shared/runs", "nfs4", "DELETE"),
        ("/mnt/my share/runs", "cifs", "DELETE"),
        ("/mnt/home", "fuse.sshfs", "DELETE"),
        ("/mnt/shared/fast/runs", "tmpfs", "WAL"),
        ("/mnt/sharedother", "ext4", "WAL"),
    ],
)
def test_a_network_file_system_is_known_and_does_without_wal(
    path: str, kind: str, mode: str
) -> None:
    # REG-03
    assert file_system(Path(path), MOUNTS) == kind
    assert journal_mode(Path(path), MOUNTS) == mode


def test_the_settings_of_a_connection(registry: Registry) -> None:
    with registry.database.read() as connection:
        pragmas = {
            name: connection.execute(f"pragma {name}").fetchone()[0]
            for name in ("journal_mode", "foreign_keys", "synchronous")
        }
    assert pragmas == {
        "journal_mode": registry.journal_mode.lower(),
        "foreign_keys": 1,
        "synchronous": 2,
    }


def newer(root: Path, journal: str = "delete") -> Path:
    """A registry as a program of the future might leave it."""
    root.mkdir(exist_ok=True)
    with sqlite3.connect(root / FILE) as connection:
        connection.execute(f"pragma journal_mode={journal}")
        connection.execute("create table alembic_version (version_num text)")
        connection.execute("insert into alembic_version values ('ffffffffffff')")
        connection.execute("pragma user_version = 9999")
    connection.close()
    return root / FILE


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("create", [True, False])
def test_a_newer_database_is_refused_and_left_as_it_is(
    tmp_path: Path, journal: str, create: bool
) -> None:
    # REG-08
    path = newer(tmp_path, journal)
    before = path.read_bytes()
    with pytest.raises(RegistryError, match=r"newer version.*ffffffffffff"):
        Registry(tmp_path, create=create)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with sqlite3.connect(path) as connection:
        connection.execute("create table songs (title text)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(RegistryError, match="no registry of kimi-eagle"):
        Registry(tmp_path)
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(RegistryError, match=str(path)):
        Registry(tmp_path)
    assert path.read_bytes() == b"not a database" * 100


def test_a_damaged_database_is_an_error_that_names_it(registry: Registry, tmp_path: Path) -> None:
    registry.begin_run("a", **RUN)
    registry.close()
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(RegistryError, match=str(path)):
        Registry(tmp_path).list_runs()


@pytest.mark.parametrize("name", ["with blank", "100%25", "what?mode=ro", "a#b", "ü"])
def test_a_root_may_have_any_name(tmp_path: Path, name: str) -> None:
    Registry(tmp_path / name).begin_run("a", **RUN)
    assert (tmp_path / name / FILE).is_file()
    assert len(Registry(tmp_path / name, create=False).list_runs()) == 1


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_writer_that_was_killed_leaves_a_registry_that_opens(
    tmp_path: Path, journal: str
) -> None:
    Registry(tmp_path).close()
    code = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('pragma journal_mode=' + sys.argv[2])\n"
        "c.execute('pragma cache_size=1')\n"
        "c.execute('begin immediate')\n"
        "c.execute('create table junk (a)')\n"
        "c.execute('insert into junk select randomblob(100000) from sqlite_master')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / FILE), journal])
    found = Registry(tmp_path)
    found.begin_run("a", **RUN)
    assert [run.id for run in found.list_runs()] == ["a"]
    with found.database.read() as connection:
        assert (
            connection.execute("select * from sqlite_master where name = 'junk'").fetchall() == []
        )


def test_an_interrupted_creation_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    Registry(tmp_path).begin_run("a", **RUN)


def described(url: str) -> dict[str, Any]:
    """Everything SQLAlchemy can tell of a database's tables."""
    engine = create_engine(url)
    inspector = inspect(engine)
    found = {}
    for table in inspector.get_table_names():
        if table != "alembic_version":
            found[table] = {
                "columns": [
                    (item["name"], str(item["type"]), item["nullable"], item["primary_key"])
                    for item in inspector.get_columns(table)
                ],
                "primary key": inspector.get_pk_constraint(table),
                "foreign keys": sorted(map(repr, inspector.get_foreign_keys(table))),
                "checks": sorted(map(repr, inspector.get_check_constraints(table))),
                "unique": sorted(map(repr, inspector.get_unique_constraints(table))),
                "indexes": sorted(map(repr, inspector.get_indexes(table))),
            }
    engine.dispose()
    return found


def test_the_migrations_make_the_tables_that_the_code_means(
    registry: Registry, tmp_path: Path
) -> None:
    other = create_engine(f"sqlite:///{tmp_path / 'other.sqlite'}")
    metadata.create_all(other)
    other.dispose()
    migrated = described(f"sqlite:///{tmp_path / FILE}")
    assert migrated == described(f"sqlite:///{tmp_path / 'other.sqlite'}")
    with engine_of(registry.database).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_a_new_registry_is_what_the_migrations_make(tmp_path: Path) -> None:
    """It is made without them."""
    migrated = Database(tmp_path / "migrated.sqlite")
    migrate(migrated)
    made = open_database(tmp_path / "root")
    for question in ("select type, name, sql from sqlite_master", "select * from alembic_version"):
        assert set(map(tuple, made.ask(question))) == set(map(tuple, migrated.ask(question)))


def test_several_processes_make_one_registry(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kimi_eagle.registry.schema import open_database\n"
        "open_database(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(6)]
    assert [process.wait(60) for process in processes] == [0] * 6
    assert known_revision(tmp_path / FILE) == REVISION


def test_every_constraint_has_a_name(registry: Registry, tmp_path: Path) -> None:
    # SQLite can drop no constraint that has none.
    for table in described(f"sqlite:///{tmp_path / FILE}").values():
        assert table["primary key"]["name"]
        for kind in ("foreign keys", "checks", "unique"):
            assert all("'name': '" in item for item in table[kind])


def test_the_newest_migration_is_the_one_that_the_code_means() -> None:
    names = sorted(path.name.split("_")[0] for path in (scripts() / "versions").glob("*.py"))
    assert names[-1] == REVISION


def test_a_hash_is_found_by_any_unambiguous_start(registry: Registry) -> None:
    rows = artifact("rows")
    execute(registry, "rows", [artifact("chats", "source", "external")], rows)
    assert registry.resolve(rows.digest) == (rows.digest, "rows")
    assert registry.resolve(rows.digest[:8].upper()) == (rows.digest, "rows")
    assert registry.resolve("rows-run") == ("rows-run", "run")


def test_none_one_and_many_are_told_apart(registry: Registry) -> None:
    for digest in ("abcd" + "0" * 60, "abcd" + "1" * 60):
        with registry.database.write() as connection:
            connection.execute(
                "insert into artifacts (digest, kind, bytes, files, label, state, created_at) "
                "values (?, 'rows', 1, '{}', '', 'present', '')",
                (digest,),
            )
    with pytest.raises(UnknownDigest, match="starts with ffff"):
        registry.resolve("ffff")
    with pytest.raises(UnknownDigest, match="too short"):
        registry.resolve("abc")
    with pytest.raises(AmbiguousDigest, match=r"2 hashes: abcd000.* \(rows\), abcd111") as caught:
        registry.resolve("abcd")
    assert len(caught.value.candidates) == 2
    assert registry.resolve("abcd0") == ("abcd" + "0" * 60, "rows")
    for wild in ("abc%", "abc_", "****", "'; --"):
        with pytest.raises(UnknownDigest):
            registry.resolve(wild)


@pytest.fixture
def chain(registry: Registry) -> dict[str, ArtifactRecord]:
    """weights file → verifier → head; chats → rows → states; head + states → draft."""
    weights = artifact("weights", "file", "external")
    verifier = ArtifactRecord(
        digest_document("test/1", "verifier"),
        "verifier",
        1,
        {},
        "external",
        "verifier",
        {"weights": weights.digest},
    )
    found = {"weights": weights, "verifier": verifier}
    found["chats"] = artifact("chats", "source", "external")
    for name, inputs in {
        "head": ["verifier"],
        "rows": ["chats"],
        "states": ["rows", "verifier"],
        "draft": ["head", "states"],
        "other": ["rows"],
    }.items():
        found[name] = artifact(name, name)
        execute(registry, name, [found[item] for item in inputs], found[name])
    return found


def labels(registry: Registry, digest: str, **directions: bool) -> set[str]:
    nodes, edges = registry.lineage(digest, **directions)
    known = {node.digest for node in nodes}
    assert all(edge.source in known and edge.target in known for edge in edges)
    return {node.label for node in nodes}


def test_lineage_leads_up_to_every_file_and_down_to_all_that_came_of_it(
    registry: Registry, chain: dict[str, ArtifactRecord]
) -> None:
    everything = set(chain) - {"other"}
    assert labels(registry, chain["draft"].digest, up=True, down=False) == everything
    assert labels(registry, chain["draft"].digest, up=False, down=True) == {"draft"}
    assert labels(registry, chain["rows"].digest, up=False, down=True) == {
        "rows",
        "states",
        "draft",
        "other",
    }
    assert labels(registry, chain["rows"].digest, up=True, down=True) == {
        "chats",
        "rows",
        "states",
        "draft",
        "other",
    }
    weights = labels(registry, chain["weights"].digest, up=False, down=True)
    assert weights == {"weights", "verifier", "head", "states", "draft"}


def test_lineage_is_of_what_was_made_not_of_what_failed(
    registry: Registry, chain: dict[str, ArtifactRecord]
) -> None:
    registry.begin_run("failed-run", **RUN)
    execution = registry.begin_execution(
        "failed-run", "late", "late", "late", {}, {"in": [chain["draft"]]}, [], "attempt", {}
    )
    registry.end_execution(execution, "failed", seconds=1.0, error="no")
    assert registry.made_by_key("late") is None
    assert labels(registry, chain["draft"].digest, up=False, down=True) == {"draft"}


def test_an_unfinished_execution_counts_for_nothing(registry: Registry) -> None:
    registry.begin_run("a", **RUN)
    registry.begin_execution("a", "head", "head", "key", {}, {}, [], "attempt", {})
    assert registry.made_by_key("key") is None
    assert registry.latest_of("head", "head") is None
    registry.abandon_running("a", "interrupted")
    assert [stage.disposition for stage in registry.stages_of("a")] == ["interrupted"]


def test_an_execution_that_cannot_be_recorded_whole_is_not_recorded(registry: Registry) -> None:
    registry.begin_run("a", **RUN)
    with pytest.raises(Exception, match="FOREIGN KEY"):
        registry.begin_execution("a", "x", "head", "key", {}, {"in": ["f" * 64]}, [], "attempt", {})
    assert registry.stages_of("a") == []


def test_a_row_of_states_keeps_its_place_and_goes_with_its_shard(registry: Registry) -> None:
    keys = [digest_document("test/1", name) for name in "abc"]
    registry.add_shard(ShardRecord("1" * 64, 10, ((keys[0], 0, 5, "d"), (keys[1], 5, 5, "d"))))
    registry.add_shard(ShardRecord("2" * 64, 10, ((keys[1], 0, 5, "d"), (keys[2], 5, 5, "d"))))
    registry.add_shard(ShardRecord("2" * 64, 10, ((keys[2], 5, 5, "d"),)))
    assert registry.missing_rows(keys) == set()
    registry.drop_shard("1" * 64)
    assert registry.missing_rows(keys) == {keys[0], keys[1]}


def test_the_migrations_are_found_from_any_folder(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from kimi_eagle.registry.store import Registry\n"
        "Registry(Path('r'))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "r" / FILE).is_file()
