"""`kimi-eagle attach`: show the progress of a run, as submit does."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import INTERRUPTED, Subparsers, add_run, code_of, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "attach",
        run,
        "show the progress of a run, as submit does; ctrl-c leaves the run alone",
    )
    add_run(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render
    from kimi_eagle.batch import Batch
    from kimi_eagle.progress import reporter

    with Batch(options.root) as batch:
        found = batch.run(options.run)
        try:
            with reporter() as told:
                outcome = batch.tell(found, told, follow=True)
        except KeyboardInterrupt:
            print(f"detached; run {found.id} goes on without you", file=sys.stderr)
            return INTERRUPTED
    with render.while_read(sys.stdout):
        render.outcome(outcome, as_json=options.json)
    return code_of(outcome.status)
