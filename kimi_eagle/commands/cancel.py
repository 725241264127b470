"""`kimi-eagle cancel`: ask a run to stop, and wait until it has."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from kimi_eagle.commands.parsing import DONE, Subparsers, add_run, command

WAIT_SECONDS = 60.0


def add(commands: Subparsers) -> None:
    parser = command(commands, "cancel", run, "ask a run to stop, and wait until it has")
    add_run(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"give up waiting after this long (default {WAIT_SECONDS:g})",
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render
    from kimi_eagle.batch import Batch
    from kimi_eagle.coordinator import LOST

    with Batch(options.root) as batch:
        found = batch.run(options.run)
        ended = batch.cancel(found, options.wait, partial(print, file=sys.stderr))
    if found.status == LOST:
        print(f"run {found.id} had lost its coordinator already", file=sys.stderr)
    with render.while_read(sys.stdout):
        render.ended(ended, as_json=options.json)
    return DONE
