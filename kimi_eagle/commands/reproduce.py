"""`kimi-eagle reproduce`: make an artifact again, and compare the bytes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.commands.parsing import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    Subparsers,
    add_hash,
    command,
)

if TYPE_CHECKING:
    from kimi_eagle.reproduction import Reproduction
    from kimi_eagle.run_record import Record

_CODES = {
    "identical": DONE,
    "within_tolerance": DONE,
    "differs": FAILED,
    "cannot": BAD_INPUT,
    "interrupted": INTERRUPTED,
}


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "reproduce", run, "make an artifact again from what is recorded, and compare it"
    )
    add_hash(parser)
    parser.add_argument(
        "--deep", action="store_true", help="run everything below it again too, whatever is there"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="a run record, in place of the registry (see `kimi-eagle record`)",
    )
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="what the manifest's paths are relative to (default: where it was submitted from)",
    )
    parser.add_argument(
        "--env",
        choices=("recorded",),
        help="run in a virtual environment with the recorded versions, made with pip",
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, terminal
    from kimi_eagle.manifest.problem import ManifestError
    from kimi_eagle.registry.schema import RegistryError
    from kimi_eagle.reproducer import find, reproduce

    try:
        record = find(options.root, options.hash, options.record)
        if options.env is not None:
            return _elsewhere(options, record)
        with render.reporter() as reporter:
            found = reproduce(
                options.root,
                record,
                sources=options.sources,
                deep=options.deep,
                reporter=reporter,
            )
    except (ManifestError, RegistryError, LookupError) as error:
        if isinstance(error, KeyError | IndexError):
            raise
        return _refused(options, error)
    with terminal.while_read(sys.stdout):
        if options.json:
            render.emit_json(found.document())
        else:
            _show(found)
    return _CODES[found.status]


def _refused(options: argparse.Namespace, error: Exception) -> int:
    """Nothing was run: say why, in the form that a result has."""
    from dataclasses import asdict

    from kimi_eagle import render, terminal

    wrong = [asdict(item) for item in getattr(error, "wrong", ())]
    with terminal.while_read(sys.stdout):
        if options.json:
            render.emit_json(
                {
                    "status": "cannot",
                    "hash": options.hash,
                    "run_id": None,
                    "stages": [],
                    "environment": {"changed": []},
                    "warnings": [],
                    "inputs": wrong,
                    "error": str(error),
                }
            )
    print(str(error), file=sys.stderr)
    return BAD_INPUT


def _elsewhere(options: argparse.Namespace, record: Record) -> int:
    """Run this command again, with the interpreter of the recorded environment."""
    from kimi_eagle.interpreter import recorded_interpreter

    target = next(stage for stage in record.stages if stage.name == record.stage)
    others = [stage.name for stage in record.stages if stage.environment != target.environment]
    if others:
        print(
            f"{', '.join(others)} ran in another environment than {target.name}; that of "
            f"{target.name} is taken",
            file=sys.stderr,
        )
    python = recorded_interpreter(
        options.root, target.environment, lambda text: print(text, file=sys.stderr)
    )
    again: list[Any] = [python, "-m", "kimi_eagle", "--root", options.root, "reproduce"]
    again.append(options.hash)
    for flag, value in (("--record", options.record), ("--sources", options.sources)):
        if value is not None:
            again += [flag, value]
    again += ["--deep"] * options.deep + ["--json"] * options.json
    # The code of that environment, not what lies in the working folder; its children likewise.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["PYTHONSAFEPATH"] = "1"
    return subprocess.run([str(part) for part in again], env=clean, check=False).returncode


def _show(found: Reproduction) -> None:
    from kimi_eagle import comparison, terminal

    def hashed(digest: str | None) -> str:
        return "-" if digest is None else terminal.Hash(digest)

    terminal.table(
        ("STAGE", "KIND", "RESULT", "EXPECTED", "FOUND"),
        [
            (
                stage.name,
                stage.kind,
                stage.status.replace("_", " "),
                hashed(stage.expected),
                hashed(stage.found),
            )
            for stage in found.stages
        ],
    )
    for stage in found.stages:
        for difference in stage.differences:
            print(f"{stage.name}: {comparison.text(difference)}")
        if stage.error:
            print(f"{stage.name}: {stage.error}")
    for change in found.changed:
        print(f"environment: {change['text']} ({', '.join(change['stages'])})")
    for warning in found.warnings:
        print(f"warning: {warning}")
    print(f"{found.target}: {found.status.replace('_', ' ')}", file=sys.stderr)
