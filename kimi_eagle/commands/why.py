"""`kimi-eagle why`: say of every stage, field by field, what made it so."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_manifest, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "why", run, "say what differs from the nearest earlier run, stage by stage"
    )
    add_manifest(parser)
    parser.add_argument("stage", nargs="?", metavar="STAGE", help="only this stage")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, terminal
    from kimi_eagle.why import document, why

    with render.reporter() as reporter:
        found = why(options.root, options.manifest, options.overrides, options.stage, reporter)
    with terminal.while_read(sys.stdout):
        if options.json:
            render.emit_json(document(found))
        else:
            terminal.table(
                ("STAGE", "ACTION", "AGAINST", "WHY"),
                [
                    (stage.name, stage.action, stage.against or "-", reason)
                    for stage in found
                    for reason in stage.reasons
                ],
            )
    return DONE
