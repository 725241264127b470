"""`kimi-eagle check-rows`: prove rows against a running server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, FAILED, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "check-rows",
        run,
        "prove that a running vLLM server renders the prompts of rows to the same tokens",
    )
    parser.epilog = (
        "The messages of the rows are read from their sources again and sent to the server's "
        "/tokenize; exit code 1 says that a prompt comes out as other tokens. A token, where the "
        "server wants one, is taken from KIMI_EAGLE_ENDPOINT_TOKEN."
    )
    add_hash(parser)
    parser.add_argument(
        "--endpoint", required=True, metavar="URL", help="such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="what it serves the verifier as, where it serves several"
    )
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="what the manifest's paths are relative to (default: where it was submitted from)",
    )
    parser.add_argument(
        "--limit", type=_rows, metavar="N", help="the first N rows alone (default: all)"
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping
    from kimi_eagle.serving_check import check_rows

    found = check_rows(
        options.root,
        options.hash,
        options.endpoint,
        model=options.model,
        sources=options.sources,
        limit=options.limit,
    )
    with render.while_read(sys.stdout):
        render_keeping.served(found, as_json=options.json)
    return DONE if found.equal else FAILED


def _rows(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows, 1 or more")
    return number
