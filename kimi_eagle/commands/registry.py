"""`kimi-eagle registry`: check, rebuild, back up or restore the registry."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, FAILED, Subparsers, command


def add(commands: Subparsers) -> None:
    text = "check, rebuild, back up or restore the registry"
    parser = commands.add_parser(
        "registry", help=text, description=text[0].upper() + text[1:] + "."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    command(actions, "check", _check, "check the registry, and what it says is on disk")
    command(actions, "rebuild", _rebuild, "make the registry again from the records on disk")
    backup = command(actions, "backup", _backup, "write the registry to a file; it may be in use")
    backup.add_argument("file", type=Path, metavar="FILE")
    backup.add_argument("--force", action="store_true", help="overwrite FILE")
    restore = command(actions, "restore", _restore, "put a backup in the registry's place")
    restore.add_argument("file", type=Path, metavar="FILE")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _check(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping, upkeep

    found = upkeep.check(options.root)
    with render.while_read(sys.stdout):
        render_keeping.checked(found, as_json=options.json)
    return FAILED if found.problems else DONE


def _rebuild(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping, upkeep

    found = upkeep.rebuild(options.root, _tell)
    with render.while_read(sys.stdout):
        render_keeping.rebuilt(found, as_json=options.json)
    return FAILED if found.problems else DONE


def _backup(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping
    from kimi_eagle.registry import maintenance

    found = maintenance.backup(options.root, options.file, force=options.force)
    with render.while_read(sys.stdout):
        render_keeping.copied(found, as_json=options.json, verb="backed up")
    return DONE


def _restore(options: argparse.Namespace) -> int:
    from kimi_eagle import render, render_keeping, upkeep

    found = upkeep.restore(options.root, options.file, _tell)
    with render.while_read(sys.stdout):
        render_keeping.copied(found, as_json=options.json, verb="restored")
    return DONE
