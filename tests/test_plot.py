"""`show --plot`: curves as text, whatever shows it, and which curves a hash has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ranking import Books
from test_training_log import train_events

from kimi_eagle.job import EventWriter
from kimi_eagle.plot import ASCII, BRAILLE, Style, plot, style_for
from kimi_eagle.registry.ledger import Reuse
from kimi_eagle.terminal import cells

FALLING = [(float(step), 100.0 - step) for step in range(1, 100)]


def field(lines: list[str]) -> list[str]:
    """What is drawn, from the top: without title, labels and axis."""
    return [line.partition("┤")[2] or line.partition("│")[2] for line in lines[1:-2]]


def test_a_falling_curve_falls_from_corner_to_corner() -> None:
    lines = plot("loss", FALLING, width=40, height=4)
    drawn = field(lines)
    starts = [len(row) - len(row.lstrip()) for row in drawn]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert len(drawn[-1]) == 40 - len("99 ┤")
    assert lines[0].split() == ["loss", "train", "1"]
    assert (lines[1].split()[0], lines[-3].split()[0]) == ("99", "1")
    assert lines[-1].split() == ["1", "99"]


def test_what_is_validated_is_marked_where_it_stands() -> None:
    lines = plot("loss", FALLING, [(1, 99.0), (99, 1.0)], width=40, height=4)
    drawn = field(lines)
    assert (drawn[0][0], drawn[-1][-1]) == (BRAILLE.mark, BRAILLE.mark)
    assert "val 1 ●" in lines[0]


def test_a_spike_among_many_points_is_seen() -> None:
    curve = [(float(step), 1.0) for step in range(100_000)]
    curve[77_777] = (77_777.0, 9.0)
    drawn = field(plot("loss", curve, width=60, height=5))
    spike = len(drawn[0]) - 1
    assert abs(spike / (60 - 3) - 0.77) < 0.05
    assert drawn[-1].strip()


@pytest.mark.parametrize("curve", [[(5.0, 2.0)], [(1.0, 3.0), (2.0, 3.0)]])
def test_a_curve_without_a_range_is_drawn(curve: list[tuple[float, float]]) -> None:
    assert any(row.strip() for row in field(plot("loss", curve, width=30)))


POINTS = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9)), min_size=1, max_size=20
).map(lambda points: [(float(x), y) for x, y in sorted(points)])


@settings(max_examples=30, deadline=None)
@given(POINTS, POINTS, st.integers(21, 120), st.sampled_from([BRAILLE, ASCII]))
def test_no_line_is_wider_than_what_shows_it(
    line: list[tuple[float, float]], marks: list[tuple[float, float]], width: int, style: Style
) -> None:
    lines = plot("full_acc_0", line, marks, width=width, style=style)
    assert max(map(cells, lines)) <= width
    assert sum(style.mark in row for row in lines[1:-2])
    if style is ASCII:
        assert "\n".join(lines).isascii()


@pytest.mark.parametrize(
    ("encoding", "style"), [("utf-8", BRAILLE), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII)]
)
def test_what_a_stream_cannot_show_is_written_in_ascii(encoding: str | None, style: Style) -> None:
    assert style_for(encoding) is style


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """A run with a training that reported."""
    found = Books(tmp_path / "runs")
    found.train("draft", 3.0)
    kept = tmp_path / "runs" / found.run / "stages"
    kept.mkdir(parents=True)
    train_events(EventWriter(kept / "draft.events"), steps=40)
    yield found
    found.registry.close()


def piped(project: Project, *arguments: str, **environment: str) -> Any:
    command = [sys.executable, "-m", "kimi_eagle", "--root", str(project.root), "show"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        check=True,
        env={**os.environ, **environment},
    ).stdout


def test_a_run_is_plotted_through_a_pipe(books: Books) -> None:
    for arguments in ((books.run, "--plot"), ("latest", "--plot")):
        text = piped(books.project, *arguments, PYTHONIOENCODING="ascii", COLUMNS="30").decode()
        assert max(map(len, text.splitlines())) <= 30
        titles = [line.split()[0] for line in text.splitlines() if "train" in line]
        assert titles == ["loss", "full_acc_0", "full_acc_1"]
        assert "simulated acceptance length" in text


def test_the_curves_are_to_be_had_as_data(books: Books) -> None:
    (training,) = books.project.cli("show", books.run, "--plot", "--json").json["trainings"]
    assert (training["stage"], training["run"]) == ("draft", books.run)
    assert training["curves"]["val/loss"] == [[40, 3.0]]
    assert len(training["curves"]["train/full_acc_1"]) == 40


def test_a_checkpoint_and_a_run_that_reused_it_have_its_curves(books: Books) -> None:
    (made,) = books.registry.stages_of(books.run)
    first = books.run
    books.begin("b" * 12)
    books.registry.reuse_executions(books.run, [Reuse("again", made, {})], [])
    for prefix, stage in ((made.outputs["checkpoint"], "draft"), (books.run, "again")):
        (training,) = books.project.cli("show", prefix, "--plot", "--json").json["trainings"]
        assert (training["stage"], training["run"]) == (stage, first)
        assert training["curves"]


def test_what_has_no_training_is_refused(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    found = project.cli("show", answer.json["run_id"], "--plot")
    assert found.code == 2
    assert "has no training to plot" in found.err
