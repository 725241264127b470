"""What a stage's `run(context)` is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle.job import ANSWERS, OUT, SHARDS, SNAPSHOTS, EventWriter, Given, Job, StageFailed
from kimi_eagle.verifiers.folder import VerifierFolder, open_folder


@dataclass(frozen=True)
class Context:
    """The job, its parameters, and where things are."""

    job: Job
    params: Any
    events: EventWriter

    @cached_property
    def verifier(self) -> VerifierFolder:
        return open_folder(Path(self.job.verifier))

    def input(self, role: str) -> Given:
        """The one input of a role.

        Raises:
            StageFailed: it is several, as a glob or a folder may be.
        """
        given = self.job.inputs[role]
        if len(given) != 1:
            raise StageFailed(f"{role} names {len(given)} files, and one is read: name that one")
        return given[0]

    def path(self, role: str) -> Path:
        return Path(self.input(role).path)

    def out(self, role: str) -> Path:
        """The folder whose content becomes the artifact of `role`."""
        folder = Path(self.job.folder) / OUT / role
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def scratch(self, name: str) -> Path:
        """A folder that goes when the stage ends."""
        folder = Path(self.job.folder) / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def shards(self) -> Path:
        """Where new shards of hidden states are staged, until the coordinator takes them."""
        folder = Path(self.job.folder) / SHARDS
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def answers(self) -> Path:
        """Where new answers of the verifier are staged, until the coordinator takes them."""
        folder = Path(self.job.folder) / ANSWERS
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def snapshots(self) -> Path:
        """Where what is saved on the way is staged, until the coordinator takes it."""
        folder = Path(self.job.folder) / SNAPSHOTS
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def root(self) -> Path:
        return Path(self.job.root)
