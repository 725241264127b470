"""What the tests of verify, gc and the registry's upkeep share."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from conftest import Project

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.objects import STAGING, Objects
from kimi_eagle.identity import digest_bytes, digest_document
from kimi_eagle.records import ArtifactRecord, ShardRecord
from kimi_eagle.registry.maintenance import TABLES
from kimi_eagle.registry.schema import FILE
from kimi_eagle.registry.store import Registry
from kimi_eagle.states.layout import CONTRACT, ROWS, StateRow, shard_path, write_rows

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


def dump(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of a registry's file, but for what it remembers of files."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: sorted(connection.execute(f"select * from {table}").fetchall(), key=repr)
            for table in TABLES
        }


def state(project: Project, digest: str) -> str:
    """An artifact's state in the registry."""
    return str(project.cli("show", digest, "--json").json["state"])


def flip(path: Path, at: int = -1) -> None:
    """Change one byte of a file that nobody should change."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


KILLED_EVICTING = """\
import os, signal, sys
from pathlib import Path
from kimi_eagle.cli import main
rename = Path.rename
def killed(path, target):
    if "discarded-" in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)
Path.rename = killed
sys.exit(main(sys.argv[1:]))
"""


def killed_evicting(project: Project, *arguments: str) -> None:
    """Run a command that dies when an eviction is recorded and its first file is to go."""
    command = [sys.executable, "-c", KILLED_EVICTING, "--root", str(project.root), *arguments]
    process = subprocess.run(command, cwd=project.folder, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr


class Store:
    """A root whose artifacts are published and recorded by the real store, without stages."""

    def __init__(self, root: Path):
        self.root = root
        self.registry = Registry(root)
        self._digests = Digests(self.registry)
        self._objects = Objects(root, self._digests)
        self._count = 0

    def close(self) -> None:
        self.registry.close()

    def cli(self, *arguments: str) -> Any:
        return Project(self.root).cli(*arguments, root=self.root)

    def folder(self, digest: str) -> Path:
        return self._objects.path(digest)

    def make(
        self,
        kind: str,
        files: dict[str, str],
        inputs: tuple[str, ...] = (),
        seconds: float = 1.0,
        resources: dict[str, Any] | None = None,
    ) -> str:
        """One run of one stage that makes an artifact of these files; its digest."""
        self._count += 1
        run = f"{self._count:012x}"
        self.registry.begin_run(run, **RUN)
        key = digest_document("test/1", [kind, files])
        execution = self.registry.begin_execution(
            run, kind, kind, key, {"inputs": {}}, {"in": list(inputs)}, [], "attempt", {}
        )
        record = self._publish(kind, files, run)
        self.registry.end_execution(
            execution,
            "executed",
            seconds=seconds,
            outputs={kind: record},
            resources=resources or {"cpu_seconds": 2 * seconds},
        )
        self.registry.end_run(run, "done")
        return record.digest

    def _publish(self, kind: str, files: dict[str, str], run: str) -> ArtifactRecord:
        staged = self.root / STAGING / f"{run}-staged"
        for name, text in files.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_text(text, "utf-8")
        record = self._objects.describe(staged, kind)
        self._objects.publish(staged, record, {"run": run})
        return record

    def shard(self, *names: str) -> str:
        """A shard with rows of these names; its digest. What is in it is of no concern here."""
        data = " ".join(names).encode()
        digest = digest_bytes(data)
        path = shard_path(self.root, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.with_suffix(".json").write_text("{}", "utf-8")
        rows = tuple((row.key, number, 1, row.digest) for number, row in enumerate(_rows(names)))
        self.registry.add_shard(ShardRecord(digest, len(data), rows))
        return digest

    def states(self, *names: str) -> str:
        """A states artifact that lists rows of these names."""
        return self.make("states", {ROWS: write_rows(_rows(names)), CONTRACT: "{}"})

    def shards(self) -> set[str]:
        """The shards on disk."""
        return {path.stem for path in (self.root / "states").glob("*/*.safetensors")}

    @property
    def file(self) -> Path:
        return self.root / FILE


def _rows(names: tuple[str, ...]) -> list[StateRow]:
    return [
        StateRow(digest_document("test/1", ["row", name]), digest_document("test/1", name), 1)
        for name in names
    ]
