"""`kimi-eagle verify`: read stored artifacts whole and compare them with their digests."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, FAILED, Subparsers, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "verify", run, "read stored artifacts whole and compare them with their digests"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "hash",
        nargs="?",
        metavar="HASH",
        help="of an artifact, or of a run for all it made, or an unambiguous start of one",
    )
    what.add_argument("--all", action="store_true", help="everything in the store")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping
    from kimi_eagle.verify import Verifier

    verifier = Verifier(options.root)
    try:
        found = verifier.verify(None if options.all else options.hash)
    finally:
        verifier.close()
    with render.while_read(sys.stdout):
        render_keeping.verified(found, as_json=options.json)
    return DONE if found.whole else FAILED
