"""`kimi-eagle pull`: take an artifact in from a store elsewhere, with its lineage."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "pull", run, "take an artifact in from elsewhere, with its lineage")
    add_hash(parser)
    parser.add_argument(
        "url", metavar="URL", help="s3://bucket/folder, a folder, or what else fsspec knows"
    )
    parser.add_argument(
        "--with-states",
        action="store_true",
        help="fetch the hidden states that led to it too, in whole shards; of a states artifact "
        "they always go",
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    moved = app.pull(
        options.root,
        options.hash,
        options.url,
        partial(print, file=sys.stderr),
        with_states=options.with_states,
    )
    with render.while_read(sys.stdout):
        render.exchanged(moved, options.url, as_json=options.json)
    return DONE
