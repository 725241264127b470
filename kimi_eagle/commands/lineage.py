"""`kimi-eagle lineage`: show what an artifact came from, and what came of it."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "lineage", run, "show what an artifact came from, and what came of it"
    )
    add_hash(parser)
    parser.add_argument("--up", action="store_true", help="only what it came from")
    parser.add_argument("--down", action="store_true", help="only what came of it")
    parser.add_argument("--files", action="store_true", help="name the files of folders, each")
    parser.add_argument("--dot", action="store_true", help="as text for Graphviz")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render
    from kimi_eagle.dot import graph

    both = options.up == options.down
    found = app.lineage(
        options.root, options.hash, up=both or options.up, down=both or options.down
    )
    with render.while_read(sys.stdout):
        if options.dot and not options.json:
            sys.stdout.write(graph(found.nodes, found.edges, found.digest, files=options.files))
        else:
            render.lineage(found, as_json=options.json, files=options.files)
    return DONE
