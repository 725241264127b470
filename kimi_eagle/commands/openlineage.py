"""`kimi-eagle openlineage`: export a run as OpenLineage events."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, Subparsers, add_run, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "openlineage",
        run,
        "export a run as OpenLineage events, one JSON object a line",
        json=False,
    )
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there, not to standard output"
    )
    parser.add_argument(
        "--namespace",
        default="kimi-eagle",
        metavar="NAME",
        help="of the jobs and datasets (default: kimi-eagle)",
    )


def run(options: argparse.Namespace) -> int:
    import json

    from kimi_eagle import app, render
    from kimi_eagle.artifacts.files import write_text

    events = app.openlineage(options.root, options.run, options.namespace)
    text = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
    if options.output is not None:
        write_text(options.output, text)
        return DONE
    with render.while_read(sys.stdout):
        sys.stdout.write(text)
    return DONE
