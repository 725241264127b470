"""The table of figures, and what `make bench` runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def table() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_table", BENCHMARKS / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def line(name: str, value: float, **more: Any) -> dict[str, Any]:
    figure = {"name": name, "value": value, "unit": "x", "baseline": None, "ratio": None, **more}
    made = {"command": "python benchmarks/a.py", "processor": "P", "cores": 2, "python": "3.12"}
    return {**figure, **made, "versions": {"torch": "2"}, "at": "2026-01-02T00:00:00Z"}


def test_the_page_is_what_the_program_makes_of_the_figures() -> None:
    command = [sys.executable, str(BENCHMARKS / "table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_newest_of_each_name_and_settings_counts(table: Any) -> None:
    found = table.newest(
        [line("a", 1, size=1), line("a", 2, size=2), line("a", 3, size=1, run="later")]
    )
    assert [one["value"] for one in found] == [3, 2]


def test_a_gpus_figure_does_not_take_the_place_of_a_cpus(table: Any) -> None:
    assert len(table.newest([line("a", 1), line("a", 2, gpus=["NVIDIA H200"])])) == 2


def test_what_falls_short_says_so(table: Any) -> None:
    gpu = {"gpus": ["NVIDIA H200"]}
    assert table.verdict(line("extract_vs_prefill", 0.95, **gpu)) == "≥ 0.95: reached"
    short = line("extract_vs_prefill", 0.94, **gpu)
    assert "falls short" in table.verdict(short)
    assert "0.94, asked ≥ 0.95" in table.page([short])
    assert table.verdict(line("extract_vs_prefill", 0.5)) == ""  # a CPU has no such bar


def test_make_bench_runs_programs_that_print_figures() -> None:
    found = re.search(
        r"^BENCHMARKS \?= (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    assert found is not None
    listed = set(found[1].split())
    # Whatever gives figures and is no part of another; `run` looks at a run that was made.
    texts = {path.stem: path.read_text("utf-8") for path in BENCHMARKS.glob("*.py")}
    programs = {
        name
        for name, text in texts.items()
        if re.search(r"^from common import .*\bFigures\b", text, re.MULTILINE)
        and "__main__" in text
    }
    assert listed == programs - {"run"}
