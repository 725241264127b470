"""Hidden states on a disk that is too small for them."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from conftest import WITH_STATES, Project, worker_of
from disks import disk as disk
from disks import fill

from kimi_eagle.identity import digest_file


def _shards(root: Path) -> list[Path]:
    return sorted((root / "states").glob("*/*.safetensors"))


def _on(disk: Path, made: Project) -> Project:
    """A project with an extraction still to come, whose runs so far lie on a disk."""
    shutil.move(made.root, disk / "runs")
    made.root.symlink_to(disk / "runs")
    made.write(WITH_STATES)
    return made


def test_what_the_disk_has_no_room_for_is_not_started(made: Project, disk: Path) -> None:
    project = _on(disk, made)
    fill(disk, 300 * 1024)
    answer = project.submit()
    assert answer.code == 1
    (error,) = [s["error"] for s in answer.json["stages"] if s["name"] == "states"]
    assert error.startswith("its hidden states do not fit: ")
    assert f"are free where {project.root} lies" in error
    assert not _shards(project.root)


def test_a_folder_that_was_not_there_holds_every_row(extracted: Project) -> None:
    """EXT-11: nobody made the folder of the store before."""
    (metrics,) = [
        stage["metrics"] for stage in extracted.submit().json["stages"] if stage["name"] == "states"
    ]
    with contextlib.closing(sqlite3.connect(extracted.root / "registry.sqlite")) as registry:
        (held,) = registry.execute("select count(*) from state_rows").fetchone()
    assert held == metrics["rows"] == 10


@pytest.mark.slow
def test_a_shard_that_cannot_be_written_fails_the_stage(made: Project) -> None:
    """EXT-11: what should be the folder of the store is a file."""
    (made.root / "states").write_text("in the way", "utf-8")
    made.write(WITH_STATES)
    answer = made.submit()
    assert answer.code == 1
    assert answer.dispositions["states"] == "failed"
    assert str(made.root / "states") in answer.err
    assert "Traceback" not in answer.err
    (made.root / "states").unlink()
    assert made.submit().code == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_whole_shards_and_the_next_submit_goes_on(
    made: Project, disk: Path
) -> None:
    """EXT-18, EXT-10: what is there is whole, listed, and not extracted again."""
    project = _on(disk, made)
    needed = project.plan()["states"]["forecast"]["bytes"]
    running = project.start_submit()
    worker_of(project.root)  # from here on nobody asks for room any more
    filler = fill(disk, needed // 2)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 1, err
    said = (out + err).lower()
    assert "no space left" in said or "disk is full" in said, said
    assert "Traceback" not in err
    whole = _shards(project.root)
    assert whole, "half of them had room"
    assert [digest_file(path) for path in whole] == [path.stem for path in whole]
    published = [path for path in (project.root / "states").rglob("*") if path.is_file()]
    assert all(path.stat().st_size for path in published)
    assert not list((project.root / ".staging").glob("*"))
    filler.unlink()
    with contextlib.closing(sqlite3.connect(project.root / "registry.sqlite")) as registry:
        (kept,) = registry.execute("select count(*) from state_rows").fetchone()
    assert kept
    answer = project.submit()
    assert answer.code == 0, answer.err
    (metrics,) = [s["metrics"] for s in answer.json["stages"] if s["name"] == "states"]
    assert metrics["rows_extracted"] == metrics["rows"] - kept
    listed = project.object_of(answer, "states") / "rows.txt"
    assert len(listed.read_text("utf-8").splitlines()) == metrics["rows"]
    assert project.cli("verify", "--all").code == 0
