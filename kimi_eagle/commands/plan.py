"""`kimi-eagle plan`: say of every stage whether it would run, and why."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_manifest, command
from kimi_eagle.sizes import parse_size


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
    for what in ("rows", "tokens"):
        parser.add_argument(
            f"--{what}",
            action="append",
            default=[],
            type=figure,
            metavar="STAGE=N",
            help=f"how many {what} a stage is expected to make of its sources, such as rows=6e5 "
            "(repeatable)",
        )
    parser.add_argument(
        "--gpu-memory",
        type=size,
        metavar="SIZE",
        help="memory of one GPU that engines are to run on, such as 141GB",
    )


def rate(text: str) -> tuple[str, float]:
    """Raises: ArgumentTypeError."""
    return _figure(text, "STAGE=TOKENS, such as states=24000")


def figure(text: str) -> tuple[str, float]:
    """Raises: ArgumentTypeError."""
    return _figure(text, "STAGE=N, such as rows=600000")


def _figure(text: str, form: str) -> tuple[str, float]:
    stage, _, value = text.partition("=")
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not stage or not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {form}")
    return stage, found


def size(text: str) -> int:
    """Raises: ArgumentTypeError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render, render_planned
    from kimi_eagle.planned import Guesses

    planned = app.plan(
        options.root,
        options.manifest,
        options.overrides,
        render.reporter(),
        Guesses(dict(options.rates), dict(options.rows), dict(options.tokens), options.gpu_memory),
    )
    with render.while_read(sys.stdout):
        render_planned.planned(planned, as_json=options.json)
    return DONE
