"""Check, rebuild, back up and restore the registry of a root."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle import recovery
from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.registry import maintenance
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.schema import FILE, REVISION, RegistryError
from kimi_eagle.survey import Survey, alive, survey

Tell = Callable[[str], None]


@dataclass
class Checked:
    """What `registry check` found."""

    file: maintenance.FileCheck
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no fault: leftovers, runs to be ended, an older schema."""

    def document(self) -> dict[str, Any]:
        """As `registry check --json` prints it."""
        return {
            "status": "problems" if self.problems else "ok",
            "registry": str(self.file.path),
            "revision": self.file.revision,
            "rows": dict(self.file.counts),
            "problems": self.problems,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Rebuilt:
    """What `registry rebuild` made."""

    path: Path
    rows: Mapping[str, int]
    problems: tuple[str, ...]
    """Records that could not be used."""
    aside: Path | None
    """Where the old registry is."""

    def document(self) -> dict[str, Any]:
        """As `registry rebuild --json` prints it."""
        return {
            "status": "problems" if self.problems else "rebuilt",
            "registry": str(self.path),
            "rows": dict(self.rows),
            "problems": list(self.problems),
            "aside": str(self.aside) if self.aside else None,
        }


def check(root: Path) -> Checked:
    """Check the registry's file, and what it says is on disk. Nothing is changed.

    Raises:
        RegistryError: there is none, it is none, or a newer version wrote it.
    """
    root = root.absolute()
    file = maintenance.check_file(root)
    checked = Checked(file, list(file.problems))
    if file.problems and file.revision is None:
        return checked
    if file.revision != REVISION:
        checked.notes.append(
            f"its schema is {file.revision}, this program's {REVISION}: it is brought up when it "
            "is next written"
        )
        return checked
    if file.problems:
        return checked
    registry = Ledger(root, create=False)
    try:
        _compare(root, registry, checked)
    finally:
        registry.close()
    return checked


def _compare(root: Path, registry: Ledger, checked: Checked) -> None:
    found: Survey = survey(root, Keeper(registry))
    checked.problems += [
        f"{record.kind} {record.digest} is not in the store" for record in found.absent
    ]
    checked.problems += [
        f"shard {digest} of hidden states is missing or of another size"
        for digest in found.absent_shards
    ]
    checked.problems += [
        f"{path} has a record of its own, and is not in the registry: "
        "`kimi-eagle registry rebuild` takes it in"
        for path in found.unknown
    ]
    checked.notes += [f"{item.path}: {item.why}" for item in found.leftovers]
    living = alive(root)
    checked.notes += [
        f"run {run_id} has no living process: the next submit records that it was interrupted"
        for run_id in registry.running_runs()
        if run_id not in living
    ]


def rebuild(root: Path, tell: Tell) -> Rebuilt:
    """Make the registry again from the records on disk, and put it in the place of the old one.

    Raises:
        RegistryError: a run is alive, or there are no records.
    """
    root = root.absolute()
    with _alone(root, tell):
        found = recovery.read(root)
        tables = recovery.tables(root, found)
        if not tables["runs"]:
            raise RegistryError(
                f"{root} holds no records of runs: there is nothing to make a registry of; --root "
                "names the folder that does"
            )
        # Made in the staging folder, which is on the same file system.
        folder = root / STAGING / f"rebuilt-{secrets.token_hex(4)}"
        try:
            new = maintenance.write_anew(folder, tables)
            aside = maintenance.put_in_place(root, new, "before-rebuild")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    rows = {name: len(items) for name, items in tables.items()}
    return Rebuilt(root / FILE, rows, tuple(found.problems), aside)


def restore(root: Path, source: Path, tell: Tell) -> maintenance.Copied:
    """Put a backup in the place of the registry, which is kept aside.

    Raises:
        RegistryError: a run is alive; or as `maintenance.restore`.
        OSError: the backup cannot be read.
    """
    root = root.absolute()
    source.stat()
    with _alone(root, tell):
        return maintenance.restore(root, source)


@contextmanager
def _alone(root: Path, tell: Tell) -> Iterator[None]:
    """Keep runs from starting; raises RegistryError when one is alive already."""
    lock = gate(root, shared=False)
    try:
        if not lock.acquire(wait=False):
            tell("waiting for others that use the registry just now")
            lock.acquire(wait=True)
        living = sorted(alive(root))
        if living:
            raise RegistryError(
                f"run {', '.join(living)} is alive and writes to the registry in {root}: wait for "
                f"its end, or end it (`kimi-eagle cancel {living[0]}`)"
            )
        yield
    finally:
        lock.release()
