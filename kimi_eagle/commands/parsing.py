"""What command modules share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

Command = Callable[[argparse.Namespace], int]
# argparse keeps the type of what `add_subparsers` returns to itself.
Subparsers = Any


def command(
    commands: Subparsers, name: str, run: Command, text: str, *, json: bool = True
) -> argparse.ArgumentParser:
    """Declare a command; `text` begins in lower case and has no full stop."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(command=run)
    add_color(parser, default=argparse.SUPPRESS)
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def add_color(parser: argparse.ArgumentParser, **default: Any) -> None:
    """--color, before the command or after it."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        help="auto: as NO_COLOR and FORCE_COLOR say, else on a terminal",
        **default,
    )


def add_manifest(parser: argparse.ArgumentParser) -> None:
    """MANIFEST and --set."""
    parser.add_argument("manifest", type=Path, metavar="MANIFEST")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="override a value, for example stages.draft.lr=1e-4 (repeatable)",
    )


def add_hash(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hash", metavar="HASH", help="a hash, or an unambiguous start of one")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run's id, or an unambiguous start of it, or `latest`"
    )


def count(text: str) -> int:
    """A whole number from 0 on. Raises: ArgumentTypeError."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def code_of(status: str) -> int:
    """The exit code for how a run came out."""
    return {"done": DONE, "failed": FAILED}.get(status, INTERRUPTED)


@contextmanager
def needs_ui() -> Iterator[None]:
    """Around imports of the extra `ui`. Raises: LookupError where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (
            "jinja2",
            "markupsafe",
            "starlette",
            "uvicorn",
        ):
            raise
        raise LookupError(
            f"{error.name} is not installed; what the page needs is the extra `ui`: "
            "pip install jinja2 starlette uvicorn"
        ) from None
