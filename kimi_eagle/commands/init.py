"""`kimi-eagle init`: write a first manifest for a verifier's folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, Subparsers, command


def add(commands: Subparsers) -> None:
    parser = command(commands, "init", run, "write a first manifest for a verifier's folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the verifier's checkpoint")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("manifest.yaml"),
        metavar="FILE",
        help="where to write it (default: manifest.yaml)",
    )
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        dest="sources",
        metavar="FILE",
        help="conversations to train on: a file, a folder or a glob (repeatable)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="questions to evaluate on")
    parser.add_argument("--name", help="of the manifest (default: the folder's)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render
    from kimi_eagle.starter import starter
    from kimi_eagle.verifiers.facts import VerifierError
    from kimi_eagle.verifiers.inspection import inspect

    try:
        found = inspect(options.folder)
    except VerifierError as error:
        raise LookupError(str(error)) from None
    written = starter(
        found,
        _seen_from(options.output, str(options.folder)),
        options.name or options.folder.resolve().name,
        [_seen_from(options.output, source) for source in options.sources],
        None if options.prompts is None else _seen_from(options.output, options.prompts),
    )
    _write(options.output, written.text, force=options.force)
    with render.while_read(sys.stdout):
        if options.json:
            render.emit_json(
                {
                    "status": "written",
                    "manifest": str(options.output),
                    "found": dict(found.found()),
                    "assumed": list(written.assumed),
                    "to_do": list(written.to_do),
                }
            )
        else:
            for what, text in found.found():
                print(f"found\t{what}: {text}" if not sys.stdout.isatty() else f"{what}: {text}")
            for title, lines in (("assumed", written.assumed), ("to do", written.to_do)):
                _print_lines(title, lines)
            print(f"{options.output} was written", file=sys.stderr)
    return DONE


def _print_lines(title: str, lines: tuple[str, ...]) -> None:
    from kimi_eagle.terminal import columns, wrap

    if not sys.stdout.isatty():
        for line in lines:
            print(f"{title}\t{line}")
        return
    print(f"\n{title}:")
    for line in lines:
        first, *rest = wrap(line, max(columns() - 4, 20))
        print(f"  - {first}")
        for part in rest:
            print(f"    {part}")


def _seen_from(manifest: Path, path: str) -> str:
    """A path as the manifest is to hold it: what was relative to this folder, relative to the
    manifest's.

    Raises: LookupError, where its name is no text that a manifest can hold.
    """
    seen = path if Path(path).is_absolute() else os.path.relpath(path, manifest.parent)
    try:
        seen.encode("utf-8")
    except UnicodeEncodeError:
        raise LookupError(
            f"{seen!r} has bytes in its name that are no UTF-8: a manifest is text; rename it, or "
            "make a link to it"
        ) from None
    return seen


def _write(path: Path, text: str, *, force: bool) -> None:
    """Raises: OSError; LookupError, where something is there and is not to be replaced."""
    from kimi_eagle.artifacts.files import write_text

    if force and not path.is_dir():
        write_text(path, text)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise LookupError(
            f"{path} is there already and was left as it is; give another file with -o"
            + ("" if path.is_dir() else ", or --force to replace it")
        ) from None
