"""`kimi-eagle doctor`: say whether this machine, this installation and the root can do the work."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kimi_eagle.commands.parsing import DONE, FAILED, Subparsers, command

if TYPE_CHECKING:
    from kimi_eagle.doctor.checks import Diagnosis

_GLYPHS = {"ok": "✓", "warn": "!", "broken": "✗", "absent": "·"}


def add(commands: Subparsers) -> None:
    command(
        commands,
        "doctor",
        run,
        "say whether this machine, installation and root can do the work (exit 1: not)",
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render
    from kimi_eagle.doctor.diagnosis import diagnose

    found = diagnose(options.root)
    with render.while_read(sys.stdout):
        if options.json:
            render.emit_json(found.document())
        else:
            _show(found)
            print("usable" if found.usable else "broken", file=sys.stderr)
    return DONE if found.usable else FAILED


def _show(found: Diagnosis) -> None:
    from kimi_eagle import terminal

    if not sys.stdout.isatty():
        terminal.table(
            ("STATE", "CHECK", "FOUND", "REMEDY"),
            [(check.state, check.name, check.found, check.remedy) for check in found.checks],
        )
        return
    signs = terminal.shows(sys.stdout, "".join(_GLYPHS.values()))
    terminal.table(
        ("STATE", "CHECK", "FOUND"),
        [
            (
                f"{_GLYPHS[check.state]} {check.state}" if signs else check.state,
                check.name,
                check.found + (f"; {check.remedy}" if check.remedy else ""),
            )
            for check in found.checks
        ],
    )
