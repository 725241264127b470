"""`kimi-eagle runs`: list runs, newest first."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime

from kimi_eagle import clock
from kimi_eagle.commands.parsing import DONE, Subparsers, command

STATUSES = ("running", "done", "failed", "interrupted", "lost")


def add(commands: Subparsers) -> None:
    parser = command(commands, "runs", run, "list runs, newest first")
    parser.add_argument(
        "--limit", type=_count, default=20, metavar="N", help="at most N (default 20)"
    )
    parser.add_argument(
        "--since",
        type=since,
        metavar="WHEN",
        help="started since: 2026-12-01 (UTC), or so long ago: 30m, 3h, 2d, 1w",
    )
    parser.add_argument("--stage", metavar="STAGE", help="with a stage of this name or kind")
    parser.add_argument("--status", choices=STATUSES, help="lost: its coordinator is dead")
    parser.add_argument("--artifact", metavar="HASH", help="that made this artifact, or took it in")
    parser.add_argument("--name", help="of a manifest with this name (* and ? as in a shell)")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render
    from kimi_eagle.registry.search import RunFilter

    wanted = RunFilter(
        since=options.since,
        stage=options.stage,
        status=options.status,
        artifact=options.artifact,
        name=options.name,
    )
    found = app.runs(options.root, wanted, options.limit)
    with render.while_read(sys.stdout):
        render.runs(found, as_json=options.json)
    return DONE


def since(text: str, now: datetime | None = None) -> str:
    """A date, a time or an age as a time in UTC, written as the registry does.

    Raises: argparse.ArgumentTypeError.
    """
    try:
        return clock.since(text, now)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return value
