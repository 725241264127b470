"""`kimi-eagle attach`: show the progress of a run, as submit does; one that lost its coordinator is
given another first."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle.commands.parsing import (
    DONE,
    INTERRUPTED,
    Subparsers,
    add_run,
    code_of,
    command,
)
from kimi_eagle.commands.submit import detached

if TYPE_CHECKING:
    from kimi_eagle.outcome import Reporter


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "attach",
        run,
        "show the progress of a run, as submit does, and take it over where its coordinator died; "
        "ctrl-c leaves the run alone",
    )
    add_run(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render
    from kimi_eagle.batch import Batch
    from kimi_eagle.coordinator import LOST
    from kimi_eagle.progress import reporter

    with Batch(options.root) as batch:
        found = batch.run(options.run)
    if found.status == LOST:
        _, code = detached(partial(_resume, options.root, found.id))
        if code != DONE:
            return code
    with Batch(options.root) as batch:
        found = batch.run(found.id)
        try:
            with reporter() as told:
                outcome = batch.tell(found, told, follow=True)
        except KeyboardInterrupt:
            print(f"detached; run {found.id} goes on without you", file=sys.stderr)
            return INTERRUPTED
    with render.while_read(sys.stdout):
        render.outcome(outcome, as_json=options.json)
    return code_of(outcome.status)


def _resume(root: Path, run_id: str, reporter: Reporter) -> int:
    """In a process of its own, which goes on without this one."""
    from kimi_eagle import app

    return code_of(app.resume(root, run_id, reporter).status)
