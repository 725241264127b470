"""`kimi-eagle submit`: run a manifest; what is unchanged is reused."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, FAILED, INTERRUPTED, Subparsers, add_manifest, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "submit", run, "run a manifest; what is unchanged is reused")
    add_manifest(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    with render.reporter() as reporter:
        outcome = app.submit(options.root, options.manifest, options.overrides, reporter)
    with render.while_read(sys.stdout):
        render.outcome(outcome, as_json=options.json)
    return {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}[outcome.status]
