"""The command line: parse, hand over to `app`, show; one boundary turns errors into exit codes.

Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted. Data goes to standard output,
progress and errors to standard error. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from kimi_eagle.commands.parsing import BAD_INPUT, INTERRUPTED, add_color

# In the order that --help lists them.
COMMANDS = (
    "init",
    "validate",
    "plan",
    "why",
    "submit",
    "runs",
    "show",
    "rank",
    "logs",
    "attach",
    "cancel",
    "lineage",
    "diff",
    "compare",
    "openlineage",
    "ui",
    "report",
    "reproduce",
    "record",
    "verify",
    "check-rows",
    "gc",
    "push",
    "pull",
    "pin",
    "unpin",
    "registry",
    "doctor",
    "completion",
    "schema",
)
# What the scripts of `completion` ask; not listed.
ASK = "_complete"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [ASK]:
        from kimi_eagle.completion.answer import answer

        return answer(given[1:], build_parser, COMMANDS)
    # What a command reads lives until it ends: to search it for cycles again and again takes a
    # tenth of its time and finds none.
    gc.set_threshold(100_000)
    # Pydantic would ask every package that is installed for plugins: none has a say in a manifest.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    options = build_parser().parse_args(given)
    command: Callable[[argparse.Namespace], int] = options.command
    _configure(options.color, options.root)
    try:
        return command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not _is_users(error):
            raise
        return _refuse(error, as_json=getattr(options, "json", False))


def _configure(color: str, root: Path) -> None:
    from kimi_eagle import terminal

    def needed(hashes: set[str]) -> Mapping[str, int]:
        from kimi_eagle import app

        return app.needed(root, hashes)

    terminal.configure(color, needed)


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


def build_parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line, whole or of some commands; docs and completion are made from it."""
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
    add_color(parser, default="auto")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in names:
        import_module(f"kimi_eagle.commands.{name.replace('-', '_')}").add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
