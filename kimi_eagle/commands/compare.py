"""`kimi-eagle compare`: acceptance lengths of several checkpoints or evaluations, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle.commands.parsing import DONE, Subparsers, command

if TYPE_CHECKING:
    from kimi_eagle.acceptance_table import Table


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "compare", run, "compare the acceptance of checkpoints, beside published drafts"
    )
    parser.add_argument(
        "hashes",
        nargs="+",
        metavar="HASH",
        help="a checkpoint, an evaluation, a release or a run, or the start of one",
    )
    parser.add_argument("--md", action="store_true", help="as a table in Markdown")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="also draw it (matplotlib must be installed)"
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, terminal
    from kimi_eagle.evaluations import compared

    found = compared(options.root, options.hashes)
    if options.png is not None:
        _draw(found, options.png)
    with terminal.while_read(sys.stdout):
        if options.json:
            render.emit_json(found.document())
        elif options.md:
            print(found.markdown())
        else:
            header, rows = found.header(), found.rows()
            # The names above the columns are part of what was asked for: in a pipe too.
            shown = rows if sys.stdout.isatty() else [header, *rows]
            terminal.table([name.upper() for name in header], shown)
            for note in found.notes():
                print(note, file=sys.stderr)
    return DONE


def _draw(found: Table, path: Path) -> None:
    """Raises: LookupError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise LookupError(
            "matplotlib is not installed: pip install matplotlib, or leave --png out"
        ) from None
    from kimi_eagle.published import published

    figure = Figure(figsize=(2 + 1.5 * len(found.lines), 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(found.evaluations)
    for place, one in enumerate(found.evaluations):
        figures = [one.lines.get(line, {}) for line in found.lines]
        axes.bar(
            [at + place * width for at in range(len(figures))],
            [item.get("acceptance_length") or 0 for item in figures],
            width,
            yerr=[item.get("standard_error") or 0 for item in figures],
            label=one.name,
        )
    for at, line in enumerate(found.lines):
        reference = published(line[0], line[1])
        if reference is not None:
            axes.fill_between([at - 0.5 * width, at + 0.8 - 0.5 * width], *reference, alpha=0.2)
    labels = [f"{line[0]}\nk={line[1]} T={line[2]:g}" for line in found.lines]
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(labels))], labels)
    axes.set_ylabel("acceptance length (bonus token included)")
    axes.legend()
    figure.savefig(path)
