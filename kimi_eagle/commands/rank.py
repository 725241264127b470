"""`kimi-eagle rank`: the trainings of a run, best first."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from kimi_eagle.commands.parsing import DONE, Subparsers, add_run, command

if TYPE_CHECKING:
    from kimi_eagle.ranking import Ranking


def add(commands: Subparsers) -> None:
    parser = command(commands, "rank", run, "rank the trainings of a run, with what they differ in")
    add_run(parser)
    parser.add_argument(
        "--by",
        choices=("acceptance_length", "val_loss"),
        help="default: acceptance length as served where all were evaluated, else validation loss",
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, terminal
    from kimi_eagle.ranking import rank

    found = rank(options.root, options.run, options.by)
    with terminal.while_read(sys.stdout):
        if options.json:
            render.emit_json(found.document())
        else:
            _show(found)
    return DONE


def _show(found: Ranking) -> None:
    from kimi_eagle import terminal

    evaluated = any(trial.evaluation is not None for trial in found.trials)
    terminal.table(
        (
            "#",
            "STAGE",
            "VAL_LOSS",
            *(["ACCEPTANCE"] if evaluated else []),
            *(name.upper() for name in found.varied),
            "CHECKPOINT",
        ),
        [
            (
                "-" if rank is None else str(rank),
                trial.train.stage,
                _figure(trial.val_loss),
                *([_figure(trial.acceptance_length)] if evaluated else []),
                *(_setting(trial.settings().get(name)) for name in found.varied),
                terminal.Hash(digest)
                if (digest := trial.train.outputs.get("checkpoint"))
                else trial.train.disposition,
            )
            for rank, trial in found.numbered()
        ],
    )
    measured = "acceptance length as served" if found.by == "acceptance_length" else "val_loss"
    print(f"run {found.run_id}: by {measured}, the best first", file=sys.stderr)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
