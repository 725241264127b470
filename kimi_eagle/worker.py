"""Run one stage: `python -m kimi_eagle.worker JOB.json`. The only module that loads the heavy
code of stages (`stages/*/run.py`)."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle.identity import digest_document
from kimi_eagle.job import (
    EVENTS,
    OUT,
    SHARDS,
    EventWriter,
    Given,
    Job,
    StageFailed,
    write_failure,
    write_result,
)
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import VerifierFolder, open_folder


@dataclass(frozen=True)
class Context:
    """What a stage's `run(context)` gets."""

    job: Job
    params: Any
    events: EventWriter

    @cached_property
    def verifier(self) -> VerifierFolder:
        return open_folder(Path(self.job.verifier))

    def input(self, role: str) -> Given:
        """The one input of a role."""
        (given,) = self.job.inputs[role]
        return given

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
    def root(self) -> Path:
        return Path(self.job.root)

    def seed(self, *parts: Any) -> int:
        """A 63-bit seed that depends on exactly `parts`."""
        return int(digest_document("seed/1", list(parts))[:16], 16) >> 1


def main(arguments: list[str]) -> int:
    job = Job.read(Path(arguments[0]))
    folder = Path(job.folder)
    context = Context(
        job, KINDS[job.kind].params.model_validate(job.params, strict=False),
        EventWriter(folder / EVENTS),
    )
    try:
        run = importlib.import_module(f"kimi_eagle.stages.{job.kind}.run")
        metrics = run.run(context)
    except (StageFailed, VerifierError) as error:
        write_failure(folder, str(error))
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        write_failure(folder, f"no space left on {error.filename or folder}: free some and submit "
                              "again; what was published is kept")
        return 1
    except ModuleNotFoundError as error:
        traceback.print_exc()
        write_failure(
            folder,
            f"{error.name} is not installed: stages of kind {job.kind} need the extra `cpu` or "
            "`gpu` (pip install 'kimi-eagle[cpu]')",
        )
        return 1
    write_result(folder, metrics)
    return 0


if __name__ == "__main__":
    # One library of OpenMP threads a process group: engines set their own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
