"""`kimi-eagle runs`: list runs, newest first."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "runs", run, "list runs, newest first")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="at most N (default 20)")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    found = app.runs(options.root, options.limit)
    with render.while_read(sys.stdout):
        render.runs(found, as_json=options.json)
    return DONE
