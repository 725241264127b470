"""Files: digested once, written whole, kept by content, locked by the living."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import kill, wait_for

from kimi_eagle.artifacts import digests as digests_module
from kimi_eagle.artifacts.digests import Digests, Stat, stat_of
from kimi_eagle.artifacts.files import inside, write_bytes
from kimi_eagle.artifacts.locks import Lock, held
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.identity import digest_bytes


class Memory:
    """Digests between runs, in a dict."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Stat, str]] = {}

    def file_stats(self) -> dict[str, tuple[Stat, str]]:
        return dict(self.rows)

    def put_file_stats(self, stats: Mapping[str, tuple[Stat, str]]) -> None:
        self.rows.update(stats)


def settled(path: Path, data: bytes) -> Path:
    """Write a file and let its times grow older than the clock's resolution."""
    path.write_bytes(data)
    time.sleep(0.1)
    return path


def look(memory: Memory, path: Path) -> str:
    digests = Digests(memory)
    digest, size = digests.of(path)
    assert size == path.stat().st_size
    digests.flush()
    return digest


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    memory, path = Memory(), settled(tmp_path / "a", b"one")
    look(memory, path)
    memory.rows[str(path)] = (memory.rows[str(path)][0], "remembered")
    assert look(memory, path) == "remembered"


def test_a_touched_file_is_read_again_found_equal_and_remembered_anew(tmp_path: Path) -> None:
    memory, path = Memory(), settled(tmp_path / "a", b"one")
    first = look(memory, path)
    path.touch()
    time.sleep(0.1)
    assert look(memory, path) == first
    assert memory.rows[str(path)][0] == stat_of(path)


def test_a_change_of_equal_size_and_restored_mtime_is_noticed(tmp_path: Path) -> None:
    memory, path = Memory(), settled(tmp_path / "a", b"one")
    look(memory, path)
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert look(memory, path) == digest_bytes(b"two")


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    memory, path = Memory(), tmp_path / "a"
    path.write_bytes(b"one")
    assert look(memory, path) == digest_bytes(b"one")
    assert memory.rows[str(path)][0] != stat_of(path)


def test_what_was_known_of_a_file_does_not_outlive_a_look_that_found_otherwise(
    tmp_path: Path,
) -> None:
    """Rot under an unchanged stat, found while the file is too young to be remembered."""
    memory, path = Memory(), tmp_path / "a"
    path.write_bytes(b"two")
    memory.rows[str(path)] = (stat_of(path), digest_bytes(b"one"))
    digests = Digests(memory)
    assert digests.of(path)[0] == digest_bytes(b"one")
    assert digests.afresh(path)[0] == digest_bytes(b"two")
    digests.flush()
    assert look(memory, path) == digest_bytes(b"two")


def test_nor_is_one_whose_reading_took_longer_than_the_clock_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A change between the first look and the reading may have left the same times.
    whole = digests_module.digest_file

    def slow(path: Path) -> str:
        time.sleep(0.1)
        return whole(path)

    monkeypatch.setattr(digests_module, "digest_file", slow)
    memory, path = Memory(), tmp_path / "a"
    path.write_bytes(b"one")
    look(memory, path)
    assert memory.rows[str(path)][0] != stat_of(path)


def test_a_file_replaced_by_an_equally_old_one_is_read_again(tmp_path: Path) -> None:
    memory, path = Memory(), settled(tmp_path / "a", b"one")
    other = settled(tmp_path / "b", b"two")
    look(memory, path)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert look(memory, path) == digest_bytes(b"two")


def test_an_empty_file_has_a_digest(tmp_path: Path) -> None:
    assert look(Memory(), settled(tmp_path / "a", b"")) == digest_bytes(b"")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")
    with pytest.raises(TypeError):
        write_bytes(path, "text, not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("relative", ["../a", "/a", "a/../../b"])
def test_paths_that_leave_their_folder_are_refused(tmp_path: Path, relative: str) -> None:
    with pytest.raises(ValueError, match="leaves its folder"):
        inside(tmp_path, relative)


def stage(root: Path, name: str, files: Mapping[str, bytes]) -> Path:
    staged = root / ".staging" / name
    for relative, data in files.items():
        (staged / relative).parent.mkdir(parents=True, exist_ok=True)
        (staged / relative).write_bytes(data)
    return staged


FILES = {"a": b"one", "deep/b": b"two"}


def published(root: Path) -> tuple[Objects, Any]:
    objects = Objects(root, Digests(Memory()))
    staged = stage(root, "first", FILES)
    record = objects.describe(staged, "rows")
    objects.publish(staged, record, {"key": "k"})
    return objects, record


def test_a_published_artifact_is_whole_read_only_and_has_its_record(tmp_path: Path) -> None:
    objects, record = published(tmp_path)
    folder = objects.path(record.digest)
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == set(FILES)
    assert all(p.stat().st_mode & 0o222 == 0 for p in folder.rglob("*") if p.is_file())
    assert objects.record_path(record.digest).is_file()
    assert objects.trouble(record) is None
    assert list((tmp_path / ".staging").iterdir()) == []


def test_publishing_the_same_content_again_keeps_what_is_there(tmp_path: Path) -> None:
    objects, record = published(tmp_path)
    before = (objects.path(record.digest) / "a").stat().st_ino
    staged = stage(tmp_path, "second", FILES)
    assert objects.describe(staged, "rows").digest == record.digest
    objects.publish(staged, record, {"key": "k"})
    assert (objects.path(record.digest) / "a").stat().st_ino == before
    assert list((tmp_path / ".staging").iterdir()) == []


def test_an_artifact_is_what_its_files_and_kind_are_not_where_they_lay(tmp_path: Path) -> None:
    objects = Objects(tmp_path, Digests(Memory()))
    one = objects.describe(stage(tmp_path, "one", FILES), "rows")
    two = objects.describe(stage(tmp_path / "elsewhere", "two", FILES), "rows")
    moved = objects.describe(stage(tmp_path, "three", {"a": b"one", "b": b"two"}), "rows")
    other = objects.describe(stage(tmp_path, "four", FILES), "vocab")
    assert one.digest == two.digest
    assert len({one.digest, moved.digest, other.digest}) == 3


@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_a_damaged_artifact_is_named_and_makes_room_for_a_whole_one(
    tmp_path: Path, harm: str
) -> None:
    objects, record = published(tmp_path)
    victim = objects.path(record.digest) / "deep/b"
    victim.chmod(0o644)
    if harm == "delete":
        victim.unlink()
    else:
        victim.write_bytes(b"tw0" if harm == "flip" else b"tw")
    trouble = objects.trouble(record)
    assert trouble is not None
    assert "deep/b" in trouble
    assert record.digest[:12] in trouble
    objects.publish(stage(tmp_path, "second", FILES), record, {"key": "k"})
    assert objects.trouble(record) is None
    assert victim.read_bytes() == b"two"


def test_what_is_no_plain_file_is_no_part_of_an_artifact(tmp_path: Path) -> None:
    objects = Objects(tmp_path, Digests(Memory()))
    (tmp_path / "outside").mkdir()
    for target in ("outside", "nowhere"):
        staged = stage(tmp_path, target, FILES)
        (staged / "link").symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match="not a plain file"):
            objects.describe(staged, "rows")
    with pytest.raises(ValueError, match="empty"):
        objects.describe(tmp_path / ".staging" / "none", "rows")


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    # EXT-17: a lock file that a dead process left behind holds nobody up.
    path = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from kimi_eagle.artifacts.locks import Lock\n"
        f"Lock(Path({str(path)!r})).acquire(wait=True); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert held(path)
    assert not Lock(path).acquire(wait=False)
    kill(holder.pid)
    holder.wait()
    holder.stdout.close()
    wait_for(lambda: not held(path), "the end of the lock")
    assert path.exists()
    with Lock(path):
        assert held(path)
    assert not held(path)
