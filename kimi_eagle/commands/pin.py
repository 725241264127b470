"""`kimi-eagle pin`: keep an artifact whatever `gc` is told."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "pin", run, "keep an artifact whatever gc is told")
    add_hash(parser)
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for those who find it")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import collect, render, render_keeping

    record, pin = collect.pin(options.root, options.hash, options.note)
    with render.while_read(sys.stdout):
        render_keeping.pinned(record, pin, as_json=options.json, now=True)
    return DONE
