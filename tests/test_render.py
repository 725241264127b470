"""What people see: tables that fit, colour where it is wanted, and progress as it goes."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project, halted_worker_of, kill, wait_for, worker_of, workers

from kimi_eagle.dot import graph
from kimi_eagle.outcome import StageOutcome
from kimi_eagle.plan import StagePlan
from kimi_eagle.progress import Pace, PlainReporter
from kimi_eagle.records import Edge, Node
from kimi_eagle.registry.schema import FILE
from kimi_eagle.terminal import Hash, cells, cut, fit, plain, wants_colour, wrap

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
A, B = "a" * 64, "a" * 15 + "b" * 49


@dataclass
class Screen:
    """A command that runs on a terminal of its own."""

    process: subprocess.Popen[bytes]
    master: int
    raw: bytes = b""
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> None:
        while text.encode() not in self.raw:
            data = self._read()
            assert data, f"{text!r} never came: {self.raw.decode()}"

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        os.close(self.master)
        return self.process.wait()

    def _read(self) -> bytes:
        data = b""
        with suppress(OSError):  # as Linux says that the other side has gone
            data = os.read(self.master, 65536)
        self.raw += data
        return data

    @property
    def text(self) -> str:
        """What was written, without colours and movements."""
        return ESCAPE.sub("", self.raw.decode())

    @property
    def rows(self) -> list[str]:
        return [line.rstrip("\r") for line in self.text.split("\n")]


def on_terminal(project: Project, *arguments: str, columns: int, **environment: str) -> Screen:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "--root", str(project.root), *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**inherited, "TERM": "xterm", **environment},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    return Screen(process, master)


# Tables


def test_a_table_that_fits_is_shown_whole() -> None:
    lines, dropped = fit(("NAME", "KEY", "WHY"), [("rows", Hash(A), "never made")], 80)
    assert lines == ["NAME  KEY           WHY", "rows  aaaaaaaaaaaa  never made"]
    assert dropped == []


def test_a_hash_is_shown_as_far_as_it_takes_to_know_it() -> None:
    rows = [("x", Hash(A, 16)), ("y", Hash(B, 16))]
    for width in (80, 20, 3):
        lines, dropped = fit(("N", "KEY"), rows, width)
        if "KEY" not in dropped:
            assert [line.split()[1] for line in lines[1:]] == ["a" * 16, "a" * 15 + "b"]
    assert dropped == ["KEY"], "rather than cut it goes"


def test_a_narrow_table_shortens_hashes_then_loses_columns_from_the_right() -> None:
    header = ("STAGE", "KEY", "TIME", "OUTPUT")
    rows = [("rows", Hash(A), "1.0s", Hash(B))]
    shown = {width: fit(header, rows, width) for width in range(5, 60)}
    assert shown[59] == (
        ["STAGE  KEY           TIME  OUTPUT", f"rows   {'a' * 12}  1.0s  {'a' * 12}"],
        [],
    )
    assert shown[31][0][1] == f"rows   {'a' * 8}  1.0s  {'a' * 8}"
    assert shown[30][1] == ["OUTPUT"]
    assert shown[20][1] == ["TIME", "OUTPUT"]
    assert shown[10][1] == ["KEY", "TIME", "OUTPUT"]
    for width, (lines, _) in shown.items():
        assert all(cells(line) <= width for line in lines)


def test_the_last_column_is_wrapped_while_there_is_room() -> None:
    why = "learning rate 3e-05 → 0.0001; input rows changed"
    lines, dropped = fit(("STAGE", "WHY"), [("draft", why)], 32)
    assert dropped == []
    assert " ".join(line[7:] for line in lines[1:]) == why
    assert all(cells(line) <= 32 for line in lines)


def test_wide_characters_take_two_columns_and_escapes_none() -> None:
    assert cells("教师") == 4
    lines, _ = fit(("NAME", "X"), [("教师", "1"), ("e\u0301", "2")], 40)
    assert lines[1:] == ["教师  1", "e\u0301     2"]
    assert plain("a\x1b[31mb\tc\n\u202e") == "a\ufffd[31mb c \ufffd"
    assert cut("教师模型", 5) == "教师…"
    assert wrap("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]


# Colour


@pytest.mark.parametrize(
    ("mode", "environment", "terminal", "wanted"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_is_as_the_flag_says_then_the_environment_then_the_terminal(
    mode: str, environment: Mapping[str, str], terminal: bool, wanted: bool
) -> None:
    assert wants_colour(mode, environment, is_terminal=terminal) is wanted


@pytest.mark.parametrize(
    ("arguments", "environment", "coloured"),
    [
        (["runs"], {}, True),
        (["runs", "--color", "never"], {}, False),
        (["--color", "never", "runs"], {}, False),
        (["runs"], {"NO_COLOR": "1"}, False),
        (["--color", "always", "runs"], {"NO_COLOR": "1"}, True),
    ],
)
def test_a_state_is_a_word_in_colour(
    first_run: tuple[Project, Answer],
    arguments: list[str],
    environment: dict[str, str],
    coloured: bool,
) -> None:
    screen = on_terminal(first_run[0], *arguments, columns=100, **environment)
    assert screen.end() == 0
    assert (b"\x1b[32mdone\x1b[0m" in screen.raw) is coloured
    assert (b"\x1b" in screen.raw) is coloured
    assert "done" in screen.text


def test_a_pipe_has_colour_only_when_asked_for(first_run: tuple[Project, Answer]) -> None:
    out, _ = first_run[0].start("runs").communicate()
    assert "\x1b" not in out
    out, _ = first_run[0].start("--color", "always", "runs").communicate()
    assert "\t\x1b[32mdone\x1b[0m\t" in out


# On a terminal


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("command", ["runs", "show", "plan", "lineage"])
def test_no_table_is_wider_than_the_terminal(
    first_run: tuple[Project, Answer], command: str, columns: int
) -> None:
    project, answer = first_run
    rows = answer.outputs["rows"]["rows"]
    arguments = {"plan": [str(project.manifest)], "show": [answer.json["run_id"]]}
    screen = on_terminal(project, command, *arguments.get(command, []), columns=columns)
    if command == "lineage":
        screen.end()
        screen = on_terminal(project, command, rows[:8], columns=columns)
    assert screen.end() == 0
    tables = [row for row in screen.rows if not row.startswith(("manifest ", "("))]
    assert max(map(len, tables)) <= columns
    hashes = [match for row in tables for match in re.findall(r"\b[0-9a-f]{8,}\b", row)]
    assert hashes
    known = answer.out + project.cli("lineage", rows, "--json", "--files").out
    assert all(found in known for found in hashes)
    if command == "show":
        left_out = "(MEMORY, WRITTEN, METRICS not shown: the terminal is 60 columns wide"
        assert (left_out in screen.text) is (columns == 60)
        assert ("METRICS" in screen.text.split("(MEMORY")[0]) is (columns == 120)


def test_hashes_that_begin_alike_are_shown_longer(made: Project) -> None:
    (run,) = made.cli("runs", "--json").json["runs"]
    twin = run["id"][:-1] + ("0" if run["id"][-1] != "0" else "1")
    with sqlite3.connect(made.root / FILE) as connection:
        columns = [row[1] for row in connection.execute("pragma table_info(runs)")]
        values = {"id": "?", "seq": "seq + 1"}
        query = ", ".join(values.get(name, name) for name in columns)
        connection.execute(f"insert into runs select {query} from runs", (twin,))
    connection.close()
    screen = on_terminal(made, "runs", columns=40)
    assert screen.end() == 0
    assert run["id"] in screen.text
    assert twin in screen.text


def test_every_table_knows_which_hashes_begin_alike(made: Project) -> None:
    (key,) = (stage["key"] for name, stage in made.plan().items() if name == "head")
    twin = key[:-1] + ("0" if key[-1] != "0" else "1")
    with sqlite3.connect(made.root / FILE) as connection:
        connection.execute(
            "insert into state_rows values (?, ?, 0, 1, ?)", (twin, _shard(connection), A)
        )
    connection.close()
    for columns in (100, 200):
        screen = on_terminal(made, "plan", str(made.manifest), columns=columns)
        assert screen.end() == 0
        assert key in screen.text
    screen = on_terminal(made, "plan", str(made.manifest), columns=40)
    assert screen.end() == 0
    assert key[:8] not in screen.text, "rather than cut it goes"
    assert "(KEY, WHY not shown" in screen.text


def _shard(connection: sqlite3.Connection) -> str:
    """A shard that there is, for a row to be in."""
    digest = "e" * 64
    connection.execute(
        "insert into state_shards values (?, 1, 1, 1, '2026-01-01T00:00:00Z')", (digest,)
    )
    return digest


def test_a_plan_says_what_waits_for_what_and_what_is_written(extracted: Project) -> None:
    screen = on_terminal(extracted, "plan", str(extracted.manifest), columns=100)
    assert screen.end() == 0
    (run,) = extracted.cli("runs", "--json", "--stage", "states").json["runs"]
    assert re.search(
        rf"head +reuse +[0-9a-f]{{12}}  made by run \w+ on {run['started_at'][:10]}", screen.text
    )
    changed = ("--set", "stages.rows.max_length=128")
    screen = on_terminal(extracted, "plan", str(extracted.manifest), *changed, columns=100)
    assert screen.end() == 0
    assert re.search(r"3 +vocab +depends +after 2 +depends on rows", screen.text)
    assert re.search(
        r"1 reuse, 1 run, 2 depends\. Writes about [\d.]+ .B of hidden states, and about [\d.]+ "
        r".B besides; [\d.]+ .B free\. "
        r"Nothing was started\.",
        screen.text,
    )
    piped = extracted.cli("plan", str(extracted.manifest), *changed).out.splitlines()
    assert piped[2].split("\t")[:4] == ["3", "vocab", "depends", "-"]


@pytest.mark.parametrize("columns", [30, 44, 60])
def test_a_lineage_cuts_names_to_the_terminal_and_hashes_never(
    first_run: tuple[Project, Answer], columns: int
) -> None:
    project, answer = first_run
    rows = answer.outputs["rows"]["rows"]
    screen = on_terminal(project, "lineage", rows, "--files", columns=columns)
    assert screen.end() == 0
    found = project.cli("lineage", rows, "--json").json
    for node in found["nodes"]:
        (line, *_) = (row for row in screen.rows if node["digest"][:12] in row)
        whole = line.index(node["digest"][:12]) + 12
        assert cells(line) <= max(columns, whole + len("  999.9 kB"))


@pytest.mark.parametrize("columns", [60, 120])
def test_submit_shows_a_line_a_stage_and_a_bar_that_fits(project: Project, columns: int) -> None:
    project.write(project.manifest.read_text("utf-8").split("  rows:")[0])
    screen = on_terminal(project, "submit", str(project.manifest), columns=columns)
    worker = halted_worker_of(project.root)
    (events,) = (project.root / ".staging").glob("*/")
    with (events / "events.ndjson").open("a") as file:
        for line in (
            '{"event": "metric", "split": "train", "values": {"full_acc_0": 0.61}}',
            '{"event": "metric", "split": "train", "values": {"full_acc_1": 0.4}}',
            '{"event": "progress", "done": 3, "total": 10, "unit": "steps", "loss": 2.314}',
        ):
            file.write(line + "\n")
    screen.read_until("3/10 steps")
    kill(worker, signal.SIGCONT)
    assert screen.end() == 0
    bars = [part for part in re.split(r"[\r\n]", screen.text) if "3/10 steps" in part]
    assert all(cells(bar) < columns for bar in bars)
    assert re.search(r"head  ━+─+  3/10 steps .*loss 2\.314", bars[-1])
    if columns == 120:
        assert "full_acc 0.61 0.40" in bars[-1]
    assert re.search(r"head: done in [0-9.]+s, 590\.7 kB", screen.text)
    assert "RESULT" in screen.text


def test_the_first_ctrl_c_stops_in_good_order_and_says_so(project: Project) -> None:
    screen = on_terminal(project, "submit", str(project.manifest), columns=80)
    worker_of(project.root)
    screen.type("\x03")
    assert screen.end() == 130
    assert "stopping in good order; ctrl-c again ends the stage at once" in screen.text
    assert "Traceback" not in screen.text
    assert workers(project.root) == {}
    (run,) = project.cli("runs", "--json").json["runs"]
    assert run["status"] == "interrupted"
    assert screen.text.rstrip().endswith(f"run {run['id']}: interrupted")


def test_a_second_ctrl_c_ends_a_stage_that_does_not_stop(project: Project) -> None:
    screen = on_terminal(project, "submit", str(project.manifest), columns=80)
    pid = halted_worker_of(project.root)  # it cannot answer a request to end
    screen.type("\x03")
    screen.read_until("stopping in good order")
    assert pid in workers(project.root)
    screen.type("\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.text
    wait_for(lambda: not workers(project.root), "the end of the worker")
    (run,) = project.cli("runs", "--json").json["runs"]
    assert run["status"] == "interrupted"


# Progress


def pace(done: int, total: int, at: float, **figures: Any) -> Pace:
    """A stage that began at 0 and has come so far at a time."""
    found = Pace("draft", 0.0)
    for step, moment in ((0, 0.0), (done, at)):
        event = {"event": "progress", "done": step, "total": total, "unit": "steps", **figures}
        found.take(event, moment)
    return found


def test_progress_in_words_and_as_a_bar() -> None:
    found = pace(30, 120, 60.0, loss=2.0, epoch=1)
    found.take(
        {"event": "metric", "split": "train", "values": {"full_acc_1": 0.25, "full_acc_0": 0.5}}, 60
    )
    found.take({"event": "metric", "split": "val", "values": {"full_acc_0": 0.9}}, 60)
    assert found.text(60.0) == ("30 of 120 steps, eta 3:00, loss 2, full_acc 0.50 0.25, epoch 1")
    line = found.line(100, 60.0)
    assert line.startswith("draft  ━")
    assert line.endswith("30/120 steps  eta 3:00  loss 2  full_acc 0.50 0.25  epoch 1")
    assert cells(line) <= 100
    assert line.count("━") / (line.count("━") + line.count("─")) == pytest.approx(0.25, abs=0.05)
    assert "full_acc" not in found.line(50, 60.0)
    for width in range(1, 130):
        assert cells(found.line(width, 60.0)) <= width


def test_the_time_left_is_of_what_a_stage_does_now() -> None:
    """An evaluation decodes without the draft first, then starts an engine that has it."""
    found = pace(160, 160, 60.0)
    for done, at in ((1, 300.0), (25, 312.0)):
        unit = "prompts with the draft"
        found.take({"event": "progress", "done": done, "total": 241, "unit": unit}, at)
    assert found.eta(312.0) == pytest.approx(108.0)


def test_a_stage_that_tells_nothing_shows_how_long_it_runs() -> None:
    assert Pace("head", 10.0).line(60, 75.0) == "head  running  1:05"


@pytest.mark.parametrize(
    "event",
    [
        {"event": "progress", "done": 0, "total": 0, "unit": "rows"},
        {"event": "progress", "done": 7, "total": 3, "unit": "rows"},
        {"event": "progress", "done": 1, "total": 3, "unit": "rows", "loss": None},
    ],
)
def test_progress_that_makes_no_sense_breaks_nothing(event: dict[str, Any]) -> None:
    found = Pace("x", 0.0)
    found.take(event, 5.0)
    assert cells(found.line(40, 9.0)) <= 40
    assert "None" not in found.text(9.0)


def test_without_a_terminal_progress_comes_every_tenth_of_the_way() -> None:
    out = io.StringIO()
    reporter = PlainReporter(out)
    stage = StagePlan("draft", "train", reasons=["lr 3e-05 → 0.0001"])
    reporter.stage_started(stage)
    for step in range(1, 501):
        event = {"event": "progress", "done": step, "total": 500, "unit": "steps", "loss": 1.5}
        reporter.stage_event(stage, event)
    reporter.stage_ended(
        StageOutcome(
            "draft",
            "train",
            "executed",
            A,
            {"checkpoint": B},
            {"steps": 500, "simulated_acceptance_length": 2.25},
            12.0,
            resources={"bytes_written": 4_700_000},
        )
    )
    lines = out.getvalue().splitlines()
    assert lines[0] == "draft: running (lr 3e-05 → 0.0001)"
    assert [line.split(" of ")[0] for line in lines[1:-1]] == [
        f"draft: {step}" for step in range(50, 501, 50)
    ]
    assert lines[-1].startswith("draft: done in 12.0s, 4.7 MB  steps=500")
    assert lines[-1].endswith("simulated acceptance length 2.25 (1 + the sum of full_acc)")


# Lineage

VERIFIER, CONFIG, WEIGHTS, HEAD = (letter * 64 for letter in "1234")
NODES = [
    Node(HEAD, "head", 10, "present", ""),
    Node(VERIFIER, "verifier", 30, "external", "Kimi"),
    Node(CONFIG, "file", 1, "external", "config.json"),
    Node(WEIGHTS, "file", 29, "external", 'we"ir\\d\n<b>'),
]
EDGES = [
    Edge(VERIFIER, HEAD, "head", "verifier"),
    Edge(CONFIG, VERIFIER, None, "config.json"),
    Edge(WEIGHTS, VERIFIER, None, "weights"),
]


def strings(dot: str) -> list[str]:
    """The quoted strings of a graph, as Graphviz reads them; nothing else may hold a quote."""
    quoted = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
    assert '"' not in quoted.sub("", dot)
    return [text.replace('\\"', '"').replace("\\\\", "\\") for text in quoted.findall(dot)]


def test_a_graph_quotes_whatever_a_file_is_called() -> None:
    dot = graph(NODES, EDGES, HEAD, files=True)
    assert len(dot.splitlines()) == 3 + len(NODES) + len(EDGES) + 1
    assert f'file\\n{"3" * 12}\\nwe"ir\\d\\n<b>' in strings(dot)
    assert f'"{WEIGHTS}" -> "{VERIFIER}" [label="weights"];' in dot


def test_a_graph_and_a_tree_fold_the_files_of_a_folder(
    first_run: tuple[Project, Answer],
) -> None:
    dot = graph(NODES, EDGES, HEAD, files=False)
    assert "2 files" in strings(dot)
    assert WEIGHTS not in dot
    assert "2 files" not in strings(graph(NODES, EDGES, WEIGHTS, files=False)), "it is asked for"
    project, answer = first_run
    head = answer.outputs["head"]["head"]
    count = len(list((project.folder / "verifier").iterdir()))
    folded = project.cli("lineage", head).out
    assert "config.json" not in folded
    (line,) = [line for line in folded.splitlines() if line.endswith(" files")]
    assert 0 < int(line.split()[0]) <= count
    unfolded = project.cli("lineage", head, "--files").out.splitlines()
    assert len(unfolded) == len(folded.splitlines()) - 1 + int(line.split()[0])
    printed = project.cli("lineage", head, "--dot")
    assert printed.out.startswith("digraph lineage {\n")
    assert f'"{head}"' in printed.out


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_the_graph(tmp_path: Path) -> None:
    dot = graph(NODES, EDGES, HEAD, files=True)
    done = subprocess.run(["dot", "-Tplain"], input=dot, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
