"""`kimi-eagle unpin`: let `gc` have an artifact again."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "unpin", run, "let gc have an artifact again")
    add_hash(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import collect, render, render_keeping

    record, pin = collect.unpin(options.root, options.hash)
    with render.while_read(sys.stdout):
        render_keeping.pinned(record, pin, as_json=options.json, now=False)
    return DONE
