"""`kimi-eagle completion`: print the script that completes this program's words in a shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.commands.parsing import DONE, Subparsers, command

SHELLS = ("bash", "zsh", "fish")


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "completion",
        run,
        "print the script that completes commands, hashes and stages in a shell",
        json=False,
    )
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help='bash: eval "$(kimi-eagle completion bash)"; zsh, after compinit: source '
        "<(kimi-eagle completion zsh); fish: kimi-eagle completion fish | source",
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import completion, terminal

    folder = Path(completion.__file__).parent
    with terminal.while_read(sys.stdout):
        sys.stdout.write((folder / f"kimi-eagle.{options.shell}").read_text("utf-8"))
    return DONE
