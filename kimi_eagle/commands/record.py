"""`kimi-eagle record`: print all that it takes to make an artifact again elsewhere."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_hash, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "record",
        run,
        "print an artifact's run record as JSON, to reproduce it elsewhere from its sources",
        json=False,
    )
    add_hash(parser)
    parser.set_defaults(json=False)


def run(options: argparse.Namespace) -> int:
    import json

    from kimi_eagle import terminal
    from kimi_eagle.run_record import exported

    document = exported(options.root, options.hash).document()
    with terminal.while_read(sys.stdout):
        print(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
    return DONE
