"""The command line: parse, hand over to `app`, show; one boundary turns errors into exit codes.

Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted. Data goes to standard output,
progress and errors to standard error. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not _is_users(error):
            raise
        return _refuse(error, as_json=getattr(options, "json", False))


def _is_users(error: Exception) -> bool:
    """Whether the message of an error is all that a user needs of it."""
    from kimi_eagle.manifest.problem import ManifestError
    from kimi_eagle.registry.schema import RegistryError

    return isinstance(error, ManifestError | RegistryError | LookupError | OSError) and not (
        isinstance(error, KeyError | IndexError)
    )


def _refuse(error: Exception, *, as_json: bool) -> int:
    from kimi_eagle import render

    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    with render.while_read(sys.stdout):
        if as_json:
            details = error.to_json() if hasattr(error, "to_json") else {}
            render.emit_json({"status": "error", "error": text, **details})
    print(text, file=sys.stderr)
    return BAD_INPUT


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; docs and completion are made from it."""
    from kimi_eagle import __version__

    parser = argparse.ArgumentParser(
        prog="kimi-eagle",
        description="Train EAGLE-3 draft models from one manifest, and know which bytes made them.",
    )
    parser.add_argument("--version", action="version", version=f"kimi-eagle {__version__}")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(os.environ.get("KIMI_EAGLE_ROOT") or "runs"),
        metavar="DIR",
        help="registry, artifacts and runs (default: $KIMI_EAGLE_ROOT, else runs)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(command=command)
        return sub

    def add_json(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--json", action="store_true", help="print one JSON document")

    for name, command, text in (
        ("validate", _validate, "check a manifest and run nothing"),
        ("plan", _plan, "say of every stage whether it would run, and why"),
        ("submit", _submit, "run a manifest; what is unchanged is reused"),
    ):
        sub = add(name, command, text)
        sub.add_argument("manifest", type=Path, metavar="MANIFEST")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="PATH=VALUE",
            dest="overrides",
            help="override a value, for example stages.draft.lr=1e-4 (repeatable)",
        )
        add_json(sub)

    sub = add("runs", _runs, "list runs, newest first")
    sub.add_argument("--limit", type=int, default=20, metavar="N", help="at most N (default 20)")
    add_json(sub)

    sub = add("show", _show, "show a run or an artifact, by its hash or the start of it")
    sub.add_argument("hash", metavar="HASH")
    add_json(sub)

    sub = add("lineage", _lineage, "show what an artifact came from, and what came of it")
    sub.add_argument("hash", metavar="HASH")
    sub.add_argument("--up", action="store_true", help="only what it came from")
    sub.add_argument("--down", action="store_true", help="only what came of it")
    add_json(sub)

    add("schema", _schema, "print the JSON Schema of manifests, for editors")
    return parser


def _validate(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    found = app.validate(options.manifest, options.overrides)
    with render.while_read(sys.stdout):
        render.validation(found, as_json=options.json)
    return DONE


def _plan(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    planned = app.plan(options.root, options.manifest, options.overrides, render.reporter())
    with render.while_read(sys.stdout):
        render.planned(planned, as_json=options.json)
    return DONE


def _submit(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    with render.reporter() as reporter:
        outcome = app.submit(options.root, options.manifest, options.overrides, reporter)
    with render.while_read(sys.stdout):
        render.outcome(outcome, as_json=options.json)
    return {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}[outcome.status]


def _runs(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    found = app.runs(options.root, options.limit)
    with render.while_read(sys.stdout):
        render.runs(found, as_json=options.json)
    return DONE


def _show(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    found = app.show(options.root, options.hash)
    with render.while_read(sys.stdout):
        render.shown(found, options.root, as_json=options.json)
    return DONE


def _lineage(options: argparse.Namespace) -> int:
    from kimi_eagle import app, render

    both = options.up == options.down
    found = app.lineage(
        options.root, options.hash, up=both or options.up, down=both or options.down
    )
    with render.while_read(sys.stdout):
        render.lineage(found, as_json=options.json)
    return DONE


def _schema(_options: argparse.Namespace) -> int:
    import json

    from kimi_eagle import render
    from kimi_eagle.manifest.model import json_schema

    with render.while_read(sys.stdout):
        print(json.dumps(json_schema(), indent=2))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
