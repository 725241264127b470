"""`docs/benchmarks.md`, made of `results.jsonl`: the newest figure of each name and settings.

    python benchmarks/table.py [--check]

`--check` writes nothing, and ends with 1 where the file is not what it would be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE.parent / "docs" / "benchmarks.md"

Line = Mapping[str, Any]

# What a figure was measured with, and what it says; all else of a line are its settings, but for
# what is measured beside it.
_CIRCUMSTANCES = {
    "command", "processor", "cores", "gpus", "system", "python", "versions", "code", "at",
}  # fmt: skip
_FIGURE = {"name", "value", "unit", "baseline", "ratio"}
_BESIDE = {
    "median", "nodes", "pairs", "turns", "pages", "kilobytes", "page", "per_position", "tokens",
    "run", "version", "stages_seconds",
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """What a figure is to reach: at least, or at most, so much."""

    least: float | None = None
    most: float | None = None
    of: str = "value"
    """`value`, or `ratio`: over the baseline."""
    gpu: bool = False
    """Whether only on a GPU."""
    where: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Settings that it asks for, each with what it may be."""

    def holds_for(self, line: Line) -> bool:
        return (
            line[self.of] is not None
            and (bool(line.get("gpus")) or not self.gpu)
            and all(line.get(name) in values for name, values in self.where)
        )

    def reached(self, line: Line) -> bool:
        found = line[self.of]
        return (self.least is None or found >= self.least) and (
            self.most is None or found <= self.most
        )

    def __str__(self) -> str:
        said = f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"
        return f"ratio {said}" if self.of == "ratio" else said


def _served(least: float) -> Bar:
    """Of the drafts that smollm2.yaml and smollm2-large.yaml make, greedy, three draft tokens."""
    where = (
        ("manifest", ("smollm2", "smollm2-large")),
        ("stage", ("score",)),
        ("draft_tokens", (3,)),
        ("temperature", (0.0,)),
    )
    return Bar(least, gpu=True, where=where)


BARS = {
    "extract_vs_prefill": Bar(0.95, gpu=True),
    "train_vs_speculators": Bar(1.3, of="ratio", gpu=True, where=(("real", (True,)),)),
    # The other is the one of DVC, redun and Snakemake that takes least.
    "noop_cpu": Bar(most=1.0, of="ratio"),
    "acceptance_mt_bench": _served(2.4),
    "acceptance_gsm8k": _served(2.8),
    "acceptance_humaneval": _served(2.8),
    "states_bytes_per_token": Bar(most=57_344, where=(("manifest", ("kimi-shape",)),)),
}

SECTIONS = {
    "Serving a draft": ("acceptance", "speedup", "regenerate", "release"),
    "Extracting hidden states": ("extract", "states", "example_connector", "readback"),
    "Training": ("train",),
    "Preparing rows": ("prepare",),
    "Finding that nothing changed": ("noop",),
    "The registry, digests, the page": ("lineage", "hash", "ui"),
}
OTHER = "Other"

INTRODUCTION = """\
<!-- Made by `python benchmarks/table.py` of benchmarks/results.jsonl: do not edit. -->
# Benchmarks

What was measured, each figure with its command, machine, versions and day. Of figures with the same
name and settings the newest stands here; all are in `benchmarks/results.jsonl`. `make bench` runs
what a CPU can run of it and prints a JSON line a figure; `--record` appends it there, and
`python benchmarks/table.py` writes this page again. *Beside* is what the figure is held against:
the other program's figure, or the same without what is measured. Acceptance lengths are pooled, the
bonus token included; of GSM8K and HumanEval one is asked to reach 2.8.
"""


def newest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each name, settings and kind of machine, in the order they first came."""
    found: dict[str, Line] = {}
    for line in lines:
        about = [line["name"], settings(line), bool(line.get("gpus"))]
        found[json.dumps(about, sort_keys=True)] = line
    return list(found.values())


def settings(line: Line) -> dict[str, Any]:
    apart = _CIRCUMSTANCES | _FIGURE | _BESIDE
    return {name: value for name, value in line.items() if name not in apart}


def bar_of(line: Line) -> Bar | None:
    bar = BARS.get(line["name"])
    return bar if bar is not None and bar.holds_for(line) else None


def verdict(line: Line) -> str:
    """The bar and whether the figure reaches it; empty where it has none."""
    bar = bar_of(line)
    if bar is None:
        return ""
    return f"{bar}: {'reached' if bar.reached(line) else '**falls short**'}"


def page(lines: Iterable[Line]) -> str:
    shown = newest(lines)
    machines = _numbered(map(machine, shown))
    versions = _numbered(map(packages, shown))
    parts = [INTRODUCTION, _short(shown)]
    for section in (*SECTIONS, OTHER):
        of_it = [line for line in shown if _section(line["name"]) == section]
        if of_it:
            rows = (_row(line, machines, versions) for line in of_it)
            parts.append(f"## {section}\n\n{_HEADER}\n" + "\n".join(rows) + "\n")
    parts.append(_legend("Machines", "M", machines))
    parts.append(_legend("Versions", "V", versions))
    return "\n".join(parts)


_HEADER = (
    "| figure | settings | value | beside | ratio | bar | command | where, with, when |\n"
    "|---|---|---|---|---|---|---|---|"
)


def _row(line: Line, machines: Mapping[str, int], versions: Mapping[str, int]) -> str:
    made = f"M{machines[machine(line)]} V{versions[packages(line)]} {line['at'][:10]}"
    cells = (
        f"`{line['name']}`",
        _told(line),
        f"{_number(line['value'])} {line['unit']}",
        _number(line["baseline"]),
        _number(line["ratio"]),
        verdict(line),
        f"`{line['command']}`",
        made,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _short(lines: Iterable[Line]) -> str:
    told = []
    for line in lines:
        bar = bar_of(line)
        if bar is not None and not bar.reached(line):
            told.append(f"- `{line['name']}` ({_told(line)}): {_number(line[bar.of])}, asked {bar}")
    if not told:
        return "Every figure that has a bar reaches it.\n"
    return "What falls short of its bar:\n\n" + "\n".join(told) + "\n"


def _legend(title: str, letter: str, found: Mapping[str, int]) -> str:
    rows = "\n".join(f"- {letter}{number}: {text}" for text, number in found.items())
    return f"## {title}\n\n{rows}\n"


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts), 1)}


def machine(line: Line) -> str:
    gpus = line.get("gpus") or []
    names = ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))
    return f"{names + ', ' if names else ''}{line['cores']} cores of {line['processor']}"


def packages(line: Line) -> str:
    told = [f"{name} {number}" for name, number in line["versions"].items()]
    return ", ".join([f"python {line['python']}", *told])


def _section(name: str) -> str:
    for title, starts in SECTIONS.items():
        if any(name == start or name.startswith(f"{start}_") for start in starts):
            return title
    return OTHER


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _told(line: Line) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in settings(line).items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            yield json.loads(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/benchmarks.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is as it should")
    given = parser.parse_args()
    made = page(read(RESULTS))
    if given.check:
        same = PAGE.exists() and PAGE.read_text("utf-8") == made
        if not same:
            print(f"{PAGE.name} is not what {RESULTS.name} gives: run benchmarks/table.py")
        return 0 if same else 1
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
