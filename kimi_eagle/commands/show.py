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
    parser.add_argument(
        "--plot", action="store_true", help="the curves of a run's trainings, or of a checkpoint's"
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    if options.plot:
        from kimi_eagle.render_curves import plotted

        with render.while_read(sys.stdout):
            plotted(options.root, options.hash, as_json=options.json)
        return DONE
    found = app.show(options.root, options.hash)
    with render.while_read(sys.stdout):
        render.shown(found, options.root, as_json=options.json)
    return DONE
