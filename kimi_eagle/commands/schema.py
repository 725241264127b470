"""`kimi-eagle schema`: print the JSON Schema of manifests, or of what a command prints."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "schema",
        run,
        "print the JSON Schema of manifests, for editors, or of what commands print",
        json=False,
    )
    parser.add_argument(
        "--output",
        metavar="COMMAND",
        help="of what this command prints with --json; `error`: of a refusal by any",
    )


def run(options: argparse.Namespace) -> int:
    import json

    from kimi_eagle import terminal

    found = _of_output(options.output) if options.output is not None else _of_manifests()
    with terminal.while_read(sys.stdout):
        print(json.dumps(found, indent=2, ensure_ascii=options.output is None))
    return DONE


def _of_manifests() -> dict[str, object]:
    from kimi_eagle.manifest.model import json_schema

    return json_schema()


def _of_output(command: str) -> dict[str, object]:
    from kimi_eagle.outputs.catalog import OUTPUTS, schema_of

    if command not in OUTPUTS:
        raise LookupError(f"{command!r} prints no such document; these do: {', '.join(OUTPUTS)}")
    return schema_of(command)
