"""`kimi-eagle show`: show what a hash, or the start of one, names."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "show", run, "show what a hash names: a run, an artifact, a stage key, a file"
    )
    add_hash(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    found = app.show(options.root, options.hash)
    with render.while_read(sys.stdout):
        render.shown(found, options.root, as_json=options.json)
    return DONE
