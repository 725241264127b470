"""`kimi-eagle schema`: print the JSON Schema of manifests, for editors."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, command


def add(commands: Subparsers) -> None:
    command(commands, "schema", run, "print the JSON Schema of manifests, for editors", json=False)


def run(options: argparse.Namespace) -> int:
    import json

    from kimi_eagle import render
    from kimi_eagle.manifest.model import json_schema

    with render.while_read(sys.stdout):
        print(json.dumps(json_schema(), indent=2))
    return DONE
