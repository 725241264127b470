"""`kimi-eagle validate`: check a manifest and run nothing."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_manifest, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "validate", run, "check a manifest and run nothing")
    add_manifest(parser)


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    found = app.validate(options.manifest, options.overrides)
    with render.while_read(sys.stdout):
        render.validation(found, as_json=options.json)
    return DONE
