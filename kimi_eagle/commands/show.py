"""`kimi-eagle show`: show what a hash, or the start of one, names."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command, count


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "show", run, "show what a hash names: a run, an artifact, a stage key, a file"
    )
    add_hash(parser)
    parser.add_argument(
        "--row",
        action="append",
        default=[],
        type=int,
        metavar="N",
        dest="rows",
        help="of rows, show row N (from 0) as text, what is supervised marked (repeatable); HASH "
        "may be the name of the stage that made them too, in the newest run that has it",
    )
    parser.add_argument(
        "--sample",
        type=count,
        default=0,
        metavar="COUNT",
        help="of rows, show so many, at equal distances from the first to the last",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="decode with this tokenizer.json instead of the one that the rows were made with",
    )
    parser.add_argument(
        "--plot", action="store_true", help="the curves of a run's trainings, or of a checkpoint's"
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render, render_rows

    if options.rows or options.sample:
        shown = app.show_rows(
            options.root, options.hash, options.rows, options.sample, options.tokenizer
        )
        with render.while_read(sys.stdout):
            render_rows.rows(shown, as_json=options.json)
        return DONE
    if options.tokenizer is not None:
        raise LookupError("--tokenizer decodes rows: say which by --row N or --sample COUNT")
    if options.plot:
        from kimi_eagle.render_curves import plotted

        with render.while_read(sys.stdout):
            plotted(options.root, options.hash, as_json=options.json)
        return DONE
    found = app.show(options.root, options.hash)
    with render.while_read(sys.stdout):
        render.shown(found, options.root, as_json=options.json)
    return DONE
