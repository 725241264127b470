"""Run one stage: `python -m kimi_eagle.worker JOB.json`. The only module that loads the heavy
code of stages (`stages/*/run.py`)."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from pathlib import Path

from kimi_eagle import garbage
from kimi_eagle.job import (
    EVENTS,
    NO_SPACE,
    EventWriter,
    Job,
    StageFailed,
    write_failure,
    write_result,
)
from kimi_eagle.nodes import here
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.context import Context
from kimi_eagle.verifiers.facts import VerifierError


def main(arguments: list[str]) -> int:
    job = Job.read(Path(arguments[0]))
    folder = Path(job.folder)
    context = Context(
        job,
        KINDS[job.kind].params.model_validate(job.params, strict=False),
        EventWriter(folder / EVENTS),
    )
    try:
        run = importlib.import_module(f"kimi_eagle.stages.{job.kind}.run")
        figures = run.run(context)
        if here() == 0:  # of several nodes the first speaks for all
            write_result(folder, figures)
    except (StageFailed, VerifierError) as error:
        write_failure(folder, str(error))
        return 1
    except ModuleNotFoundError as error:
        traceback.print_exc()
        write_failure(
            folder,
            f"{error.name} is not installed: stages of kind {job.kind} need the extra `cpu` or "
            "`gpu` (pip install 'kimi-eagle[cpu]')",
        )
        return 1
    except Exception as error:
        if not _no_space(error):
            raise
        return NO_SPACE
    return 0


def _no_space(error: Exception) -> bool:
    """Whether an error says that a disk or a quota is full; libraries have words of their own."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return os.strerror(errno.ENOSPC) in str(error)


if __name__ == "__main__":
    # One library of OpenMP threads a process group: engines set their own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    garbage.look_seldom()
    sys.exit(main(sys.argv[1:]))
