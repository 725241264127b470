"""`kimi-eagle diff`: what differs between two artifacts, runs or manifests, leaf by leaf."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kimi_eagle.commands.parsing import DONE, Subparsers, command

if TYPE_CHECKING:
    from kimi_eagle.difference import Comparison, Leaf


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "diff", run, "show what differs between two artifacts, runs or manifests"
    )
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(), metavar=name, help="a hash or a run's id (or its start), or a manifest"
        )
    parser.add_argument("--all", action="store_true", help="also what is equal")
    parser.add_argument("--md", action="store_true", help="as a table in Markdown")


def run(options: argparse.Namespace) -> int:
    from kimi_eagle import render, terminal
    from kimi_eagle.sides import compared
    from kimi_eagle.weights import HEADER

    with render.reporter() as reporter:
        found = compared(options.root, options.a, options.b, reporter)
    with terminal.while_read(sys.stdout):
        if options.json:
            render.emit_json(found.document(whole=options.all))
            return DONE
        shown = list(found.leaves) if options.all else found.different
        if options.md:
            _markdown(found, shown, whole=options.all)
        else:
            terminal.table(
                ("SECTION", "NAME", "A", "B"),
                [(leaf.section, leaf.name, _cell(leaf.a), _cell(leaf.b)) for leaf in shown],
            )
            if found.weights is not None:
                terminal.table(HEADER, found.weights.rows(whole=options.all))
            print(found.verdict.text())
            for warning in found.verdict.warnings:
                print(f"warning: {warning}")
    if not options.all:
        hidden = len(found.leaves) - len(found.different)
        print(f"{hidden} equal hidden (--all shows them)", file=sys.stderr)
    return DONE


def _markdown(found: Comparison, shown: list[Leaf], *, whole: bool) -> None:
    from kimi_eagle.identity import short
    from kimi_eagle.weights import HEADER

    names = [short(side.name) if len(side.name) == 64 else side.name for side in (found.a, found.b)]
    print(f"|  |  | {_escaped(names[0])} | {_escaped(names[1])} |\n|---|---|---|---|")
    for leaf in shown:
        cells = (leaf.section, leaf.name, _brief(leaf.a), _brief(leaf.b))
        print(_row(cells))
    if found.weights is not None:
        print()
        for row in (HEADER, ("---",) * len(HEADER), *found.weights.rows(whole=whole)):
            print(_row(row))
    print(f"\n{found.verdict.text()}")
    for warning in found.verdict.warnings:
        print(f"\nwarning: {warning}")


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _cell(value: Any) -> str:
    from kimi_eagle import terminal

    return terminal.Hash(value) if _is_digest(value) else _text(value)


def _brief(value: Any) -> str:
    from kimi_eagle.identity import short

    return short(value) if _is_digest(value) else _text(value)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) in (40, 64) and value.isalnum()


def _text(value: Any) -> str:
    import json

    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
