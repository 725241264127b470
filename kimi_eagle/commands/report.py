"""`kimi-eagle report`: a run as one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, Subparsers, add_run, command, needs_ui


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "report", run, "write a run as one HTML file that needs nothing else"
    )
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write"
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render

    with needs_ui():
        from kimi_eagle.ui.report import write

    written = write(options.root, options.run, options.output)
    if options.json:
        render.emit_json(
            {"run": written.run_id, "file": str(options.output), "bytes": written.bytes}
        )
    else:
        print(f"run {written.run_id}: {options.output}, {written.bytes} bytes", file=sys.stderr)
    return DONE
