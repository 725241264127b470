"""`kimi-eagle plan`: say of every stage whether it would run, and why."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_manifest, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "plan", run, "say of every stage whether it would run, and why")
    add_manifest(parser)
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        type=rate,
        metavar="STAGE=TOKENS",
        dest="rates",
        help="tokens a second of one worker of an extraction or a training, where none like it ran "
        "under this root (repeatable)",
    )


def rate(text: str) -> tuple[str, float]:
    """Raises: ArgumentTypeError."""
    stage, _, value = text.partition("=")
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not stage or not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=TOKENS, such as states=24000")
    return stage, found


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    planned = app.plan(
        options.root,
        options.manifest,
        options.overrides,
        render.reporter(),
        dict(options.rates),
    )
    with render.while_read(sys.stdout):
        render.planned(planned, as_json=options.json)
    return DONE
