"""`kimi-eagle gc`: free disk by evicting what can be made again."""

from __future__ import annotations

import argparse
import re
import sys
from datetime import timedelta

from kimi_eagle.commands.parsing import DONE, Subparsers, command, count
from kimi_eagle.sizes import parse_size

_AGE = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add(commands: Subparsers) -> None:
    parser = command(commands, "gc", run, "free disk by evicting what can be made again")
    parser.epilog = (
        "What may go must meet every condition given; without one, only leftovers of runs that "
        "ended go. Pinned artifacts, checkpoints, evaluations and releases stay. What is evicted "
        "keeps its record: what was made of it is still reused, and it is made again when needed."
    )
    parser.add_argument(
        "--older-than", type=age, metavar="AGE", help="not used for this long: 30d, 12h, 2w"
    )
    parser.add_argument(
        "--keep-runs", type=count, metavar="N", help="neither made nor reused by the last N runs"
    )
    parser.add_argument(
        "--max-bytes", type=size, metavar="SIZE", help="only until the store fits in: 500GB, 2TiB"
    )
    parser.add_argument(
        "--results",
        action="store_true",
        help="checkpoints, evaluations and releases too, but for pinned ones and what came of them",
    )
    parser.add_argument("--yes", action="store_true", help="do it; without, only say what would go")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping
    from kimi_eagle.collect import Collector, Policy

    policy = Policy(options.older_than, options.keep_runs, options.max_bytes, options.results)
    collector = Collector(options.root, lambda text: print(text, file=sys.stderr))
    try:
        found = collector.collect(policy) if options.yes else collector.preview(policy)
    finally:
        collector.close()
    with render.while_read(sys.stdout):
        render_keeping.collected(found, as_json=options.json)
    return DONE


def age(text: str) -> timedelta:
    """`30d`, `12h`, `90m`, `2w`. Raises: ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no age: give a number and m, h, d or w, for example 30d"
        )
    try:
        return timedelta(seconds=float(found[1]) * _AGE[found[2]])
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} is too long ago") from None


def size(text: str) -> int:
    """As `sizes.parse_size`. Raises: ArgumentTypeError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
