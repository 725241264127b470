"""`kimi-eagle ui`: runs, curves, lineage and acceptance in a browser, read-only."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, command, count, needs_ui


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "ui", run, "look at runs, curves and lineage in a browser, read-only", json=False
    )
    parser.add_argument(
        "--port",
        type=count,
        metavar="N",
        help="listen on this port (default: 8265, or another that is free)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen on this address (default: 127.0.0.1, which only this machine reaches)",
    )


def run(options: argparse.Namespace) -> int:
    with needs_ui():
        from kimi_eagle.ui.access import LOOPBACK
        from kimi_eagle.ui.server import serve

    def announce(address: str) -> None:
        print(address, flush=True)
        if options.host not in LOOPBACK:
            print(
                "this can be reached from elsewhere, and what is shown crosses the network "
                "unencrypted, token included; `ssh -L` to loopback does not",
                file=sys.stderr,
            )

    serve(options.root, options.host, options.port, announce)
    return DONE
