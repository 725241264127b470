"""`kimi-eagle plan`: say of every stage whether it would run, and why."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_manifest, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "plan", run, "say of every stage whether it would run, and why")
    add_manifest(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    planned = app.plan(options.root, options.manifest, options.overrides, render.reporter())
    with render.while_read(sys.stdout):
        render.planned(planned, as_json=options.json)
    return DONE
