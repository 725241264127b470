"""Disks of a size that is known, for what happens when they are full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, free: int) -> Path:
    """Fill a disk up to `free` bytes; returns the file that does it."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        file.truncate(0)
        left = shutil.disk_usage(disk).free - free
        file.write(bytes(max(left, 0)))
    return filler
