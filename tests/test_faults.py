"""What goes wrong while a run is under way, on the real runner: kills, full disks, edits, crowds.

How the points of the kills are drawn: the length of an unbroken run is measured first, while as
many run at once as later on. The life of a run from its start (the interpreter still loading) to
its end is cut into as many equal parts as there are kills, and every kill falls at a random
moment of its part, all from one seed; so the points cover the life evenly, and a second test run
draws the same ones. For kills of a worker, the life is that of the worker. A kill that finds
nobody left to kill is drawn again and does not count. Every kill has a root of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import HEAD, Answer, Project, halted_worker_of, kill, new_project, wait_for, workers
from disks import disk as disk
from disks import fill

from kimi_eagle.identity import digest_file, digest_tree

SEED = 20261201
AT_ONCE = 2


# What must hold after any fault


def start(project: Project, root: Path) -> subprocess.Popen[str]:
    """A submit in a session of its own, under a root of its own."""
    command = ["submit", str(project.manifest), "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "--root", str(root), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def submit(project: Project, root: Path) -> Answer:
    process = start(project, root)
    out, err = process.communicate()
    return Answer(process.returncode, out, err)


def holders(root: Path) -> set[int]:
    """Processes that have a file under a root open, or were started to work there."""
    found = set(workers(root))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                files = [link.readlink() for link in (entry / "fd").iterdir()]
                if any(file.is_relative_to(root) for file in files):
                    found.add(int(entry.name))
    return found - {os.getpid()}


def half_made(root: Path) -> list[str]:
    """What in the store is not whole: objects unlike their names or records, stray files."""
    found = []
    for path in (root / "objects").glob("*/*"):
        digest = path.name.removesuffix(".json")
        folder = path.with_name(digest)
        record = path.with_name(f"{digest}.json")
        if path.name.startswith("."):
            found.append(f"{path} is left over")
        elif path.is_dir():
            files = {
                str(file.relative_to(folder)): (digest_file(file), file.stat().st_size)
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            }
            kinds = ["head", "rows", "vocab"]
            if record.exists():
                told = json.loads(record.read_text("utf-8"))
                kinds = [told["kind"]]
                if {name: tuple(entry) for name, entry in told["files"].items()} != files:
                    found.append(f"{folder} is unlike its record")
            if digest not in [digest_tree(kind, files) for kind in kinds]:
                found.append(f"{folder} is unlike its name")
        elif not folder.is_dir():
            found.append(f"{path} has no object")
    return found


def registry_of(root: Path) -> sqlite3.Connection:
    return sqlite3.connect(root / "registry.sqlite")


def told_wrong(root: Path) -> list[str]:
    """What the registry says that is not so: damage, dead runs that run, outputs that are not."""
    found = []
    with contextlib.closing(registry_of(root)) as registry:
        found += [row[0] for row in registry.execute("pragma integrity_check") if row[0] != "ok"]
        found += [f"broken reference {row}" for row in registry.execute("pragma foreign_key_check")]
        running = "select id from runs where status = 'running' union all "
        running += "select id from executions where disposition = 'running'"
        found += [f"{row[0]} is said to run" for row in registry.execute(running)]
        for digest, state in registry.execute("select digest, state from artifacts"):
            if state == "present" and not (root / "objects" / digest[:2] / digest).is_dir():
                found.append(f"{digest} is said to be there")
    return found


def left_in_staging(root: Path) -> list[str]:
    return [path.name for path in (root / ".staging").glob("*")]


def heals(project: Project, root: Path, expected: dict[str, dict[str, str]]) -> list[str]:
    """What is wrong with the next submit after a fault; empty when nothing is."""
    answer = submit(project, root)
    if answer.code != 0:
        return [f"the next submit ended with {answer.code}: {answer.err}"]
    wrong = half_made(root) + told_wrong(root)
    if answer.outputs != expected:
        wrong.append(f"the next submit made {answer.outputs}")
    if left_in_staging(root):
        wrong.append(f"staging holds {left_in_staging(root)}")
    return wrong


# Kills


def strike(pid: int, kill_it: Callable[[int, int], None] = os.kill) -> bool:
    """Kill a process or a group; false when it was gone."""
    try:
        kill_it(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def of_runner(process: subprocess.Popen[str], moment: float) -> bool:
    time.sleep(moment)
    return process.poll() is None and strike(process.pid)


def of_everything(process: subprocess.Popen[str], moment: float) -> bool:
    """The runner's group, and the group of its stage, as a machine that goes down would."""
    time.sleep(moment)
    groups = set()
    for pid in children(process.pid):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    struck = process.poll() is None and strike(process.pid, os.killpg)
    for group in groups - {process.pid}:
        strike(group, os.killpg)
    return struck


def of_worker(process: subprocess.Popen[str], moment: float) -> bool:
    while process.poll() is None:
        # The runner's child is the guard, whose child is the worker.
        for pid in (pid for guard in children(process.pid) for pid in children(guard)):
            time.sleep(moment)
            return strike(pid)
        time.sleep(0.005)
    return False


KILLS: dict[str, Callable[[subprocess.Popen[str], float], bool]] = {
    "runner": of_runner,
    "everything": of_everything,
    "worker": of_worker,
}


class Strikes:
    """Kills runs of one manifest, each under a root of its own, at most two at once."""

    def __init__(self, project: Project, folder: Path):
        self.project = project
        self._folder = folder
        self._names = itertools.count()
        answers: list[tuple[Answer, float]] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda _: self._unbroken(), range(AT_ONCE)))
        assert all(answer.code == 0 for answer, _ in answers), answers[0][0].err
        self.expected = answers[0][0].outputs
        assert all(answer.outputs == self.expected for answer, _ in answers)
        self.life = statistics.median(seconds for _, seconds in answers)
        stages = [sum(s["seconds"] for s in answer.json["stages"]) for answer, _ in answers]
        self.work = statistics.median(stages)

    def _root(self) -> Path:
        return self._folder / f"root-{next(self._names)}"

    def _unbroken(self) -> tuple[Answer, float]:
        started = time.monotonic()
        return submit(self.project, self._root()), time.monotonic() - started

    def at(self, kind: str, moments: list[float]) -> list[str]:
        """Kill a run at each of these moments; returns whatever is wrong afterwards.

        A kill that came too late is drawn again, earlier.
        """
        draw = random.Random(SEED)
        lock = threading.Lock()

        def one(moment: float) -> list[str]:
            for _ in range(20):
                struck, wrong = self._one(kind, moment)
                if struck:
                    return [f"{kind} killed after {moment:.3f} s: {text}" for text in wrong]
                assert not wrong, wrong
                with lock:
                    moment *= draw.random()
            return [f"no {kind} could be struck"]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [text for wrong in pool.map(one, moments) for text in wrong]

    def _one(self, kind: str, moment: float) -> tuple[bool, list[str]]:
        root = self._root()
        process = start(self.project, root)
        struck = KILLS[kind](process, moment)
        _, err = process.communicate()
        wrong = []
        told = kind != "worker" or "was ended by signal 9" in err
        if process.returncode == 0:
            struck = False  # it had done its work: what waits to be reaped can be struck still
        elif process.returncode != (1 if kind == "worker" else -signal.SIGKILL) or not told:
            wrong.append(f"the run ended with {process.returncode}: {err}")
        wait_for(lambda: not holders(root), "the end of every process of the run", 20)
        wrong += half_made(root)
        if root.exists():
            wrong += heals(self.project, root, self.expected)
            shutil.rmtree(root)
        return struck, wrong


def moments(count: int, life: float, seed: int = SEED) -> list[float]:
    """One random moment in each of `count` equal parts of a life, shuffled."""
    draw = random.Random(seed)
    found = [(part + draw.random()) * life / count for part in range(count)]
    draw.shuffle(found)
    return found


@pytest.fixture(scope="module")
def head_strikes(tmp_path_factory: pytest.TempPathFactory) -> Strikes:
    folder = tmp_path_factory.mktemp("strikes")
    return Strikes(new_project(folder / "project", HEAD), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("runner", 90), ("everything", 60), ("worker", 50)])
def test_a_kill_at_any_moment_leaves_nothing_half_and_is_made_good(
    head_strikes: Strikes, kind: str, count: int
) -> None:
    # RUN-07; 200 points in all
    life = head_strikes.work if kind == "worker" else head_strikes.life
    assert head_strikes.at(kind, moments(count, life)) == []


@pytest.mark.slow
def test_a_kill_in_a_run_of_several_stages_leaves_the_stages_before_it(
    project: Project, tmp_path: Path
) -> None:
    strikes = Strikes(project, tmp_path)
    assert strikes.at("runner", moments(4, strikes.life)) == []


def test_a_worker_that_no_one_watches_any_more_is_killed_with_its_guard(
    head_project: Project,
) -> None:
    process = head_project.start_submit()
    worker = halted_worker_of(head_project.root)
    (guard,) = children(process.pid)
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot end the group for the guard
    kill(guard)
    kill(process.pid)
    process.communicate()
    wait_for(lambda: worker not in workers(head_project.root), "the end of the worker", 10)
    assert not half_made(head_project.root)


def test_a_halted_worker_does_not_outlive_its_runner(head_project: Project) -> None:
    process = head_project.start_submit()
    halted_worker_of(head_project.root)
    kill(process.pid)
    process.communicate()
    wait_for(lambda: not holders(head_project.root), "the end of every process of the run", 10)


# Inputs edited while a run is under way


@pytest.mark.slow
def test_an_input_edited_at_any_moment_never_passes_for_what_it_was(
    project: Project, tmp_path: Path
) -> None:
    """What is recorded as made of an input holds that input's bytes, and the next run those of
    now."""
    project.write(HEAD)
    template = project.folder / "verifier" / "chat_template.jinja"
    text = template.read_text("utf-8")
    started = time.monotonic()
    assert submit(project, tmp_path / "unbroken").code == 0
    life = time.monotonic() - started
    dispositions = set()
    for number, moment in enumerate(moments(10, life)):
        root = tmp_path / f"root-{number}"
        process = start(project, root)
        time.sleep(moment)
        template.write_text(f"{text}{{# {number} #}}", "utf-8")
        _, err = process.communicate()
        dispositions.add(process.returncode)
        if process.returncode == 1:
            assert "chat_template.jinja changed while" in err
        assert not half_made(root)
        assert made_of_other_bytes(root, template.name) == []
        answer = submit(project, root)
        assert answer.code == 0, answer.err
        assert made_of_other_bytes(root, template.name) == []
        (digest,) = answer.outputs["head"].values()
        made = root / "objects" / digest[:2] / digest / template.name
        assert made.read_bytes() == template.read_bytes()
    assert dispositions == {0, 1}, "some edits came before or after the work, and some during it"


def made_of_other_bytes(root: Path, name: str) -> list[str]:
    """Heads whose file of this name is not the one that their execution took in."""
    question = """
        select o.digest, m.child from executions e
        join execution_outputs o on o.execution = e.id
        join execution_inputs i on i.execution = e.id
        join artifact_members m on m.parent = i.digest
        where e.disposition = 'executed' and m.path = ?"""
    with contextlib.closing(registry_of(root)) as registry:
        rows = registry.execute(question, (name,)).fetchall()
    return [
        digest
        for digest, taken in rows
        if digest_file(root / "objects" / digest[:2] / digest / name) != taken
    ]


# Disks


@pytest.mark.slow
def test_a_full_disk_ends_a_run_in_words_and_the_next_goes_on(
    head_project: Project, disk: Path
) -> None:
    """The disk is full from the start, and later and later in the run."""
    expected = submit(head_project, head_project.root).outputs
    codes = []
    for free in range(0, 1200 * 1024, 96 * 1024):
        root = disk / f"runs-{free}"
        filler = fill(disk, free)
        answer = submit(head_project, root)
        codes.append(answer.code)
        assert "Traceback" not in answer.err
        if answer.code != 0:
            said = answer.err.lower()
            assert "no space left" in said or "disk is full" in said, (free, answer.err)
        assert not half_made(root)
        filler.unlink()
        assert heals(head_project, root, expected) == []
        shutil.rmtree(root)
    assert codes[0] == 2, "there was not even room for a registry"
    assert 1 in codes, "a stage ran out of space"
    assert codes[-1] == 0, "in the end there was enough"


def test_a_root_on_a_disk_that_is_read_only_is_told_so(head_project: Project, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    answer = submit(head_project, disk / "runs")
    assert answer.code == 2
    assert "Read-only file system" in answer.err
    assert str(disk / "runs") in answer.err
    assert "Traceback" not in answer.err


def test_a_disk_that_became_read_only_can_be_asked_and_keeps_what_it_has(
    head_project: Project, disk: Path
) -> None:
    root = disk / "runs"
    made = submit(head_project, root)
    assert made.code == 0, made.err
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    answer = submit(head_project, root)
    assert answer.code == 2
    assert str(root) in answer.err
    assert "Traceback" not in answer.err
    asked = head_project.cli("runs", "--json", root=root)
    assert (asked.code, len(asked.json["runs"])) == (0, 1), asked.err
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert submit(head_project, root).dispositions == {"head": "reused"}


# Clocks


def test_a_clock_that_was_set_back_hides_no_change(project: Project) -> None:
    """A file from the future, changed without a change of size, and given its time again."""
    project.write(HEAD)
    template = project.folder / "verifier" / "chat_template.jinja"
    ahead = time.time_ns() + 3_600_000_000_000
    text = template.read_bytes()
    outputs = []
    for end in (b"{# a #}", b"{# b #}"):
        template.write_bytes(text + end)
        os.utime(template, ns=(ahead, ahead))
        answer = project.submit()
        assert answer.dispositions == {"head": "executed"}
        outputs.append(answer.outputs)
    assert outputs[0] != outputs[1]
    os.utime(template, ns=(0, 0))
    assert project.submit().dispositions == {"head": "reused"}


def test_runs_from_the_future_come_before_those_of_now(made: Project) -> None:
    """The order of runs is that in which they were begun, whatever the clock said."""
    with contextlib.closing(registry_of(made.root)) as registry, registry:
        registry.execute("update runs set started_at = '2999-01-01T00:00:00.000000Z'")
        registry.execute("update executions set started_at = '2999-01-01T00:00:00.000000Z'")
    answer = made.submit()
    assert set(answer.dispositions.values()) == {"reused"}
    listed = made.cli("runs", "--json").json["runs"]
    assert listed[0]["id"] == answer.json["run_id"]
    changed = made.plan("--set", "stages.vocab.size=64")["vocab"]
    assert changed["action"] == "run"
    assert all(stage["seconds"] >= 0 for stage in answer.json["stages"])


# Crowds

CROWD, TIMES = 8, 25


def test_no_transaction_of_eight_submits_at_once_is_lost(made: Project, tmp_path: Path) -> None:
    """8 processes submit 25 times each: begin, reuse and end of a run are three transactions and
    more, so that 800 are well passed; every one of them must be there."""
    gate = tmp_path / "gate"
    code = (
        "import sys, time, pathlib\n"
        "from kimi_eagle.cli import main\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        f"for _ in range({TIMES}):\n"
        "    if main(['--root', sys.argv[2], 'submit', sys.argv[3], '--json']): sys.exit(1)\n"
    )
    arguments = [sys.executable, "-c", code, str(gate), str(made.root), str(made.manifest)]
    crowd = [
        subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(CROWD)
    ]
    gate.touch()
    said = [process.communicate()[1] for process in crowd]
    assert [process.returncode for process in crowd] == [0] * CROWD, said
    with contextlib.closing(registry_of(made.root)) as registry:

        def one(question: str) -> Any:
            return registry.execute(question).fetchone()[0]

        runs = CROWD * TIMES
        assert one("select count(*) from runs where status = 'done'") == runs + 1
        assert one("select max(seq) from runs") == runs + 1
        assert one("select count(*) from executions where disposition = 'reused'") == 3 * runs
        taken = "select count(*) from execution_outputs o join executions e on e.id = o.execution"
        assert one(f"{taken} where e.disposition = 'reused'") == 3 * runs
    assert told_wrong(made.root) == []


def test_two_submits_of_one_stage_at_once_execute_it_once(head_project: Project) -> None:
    first = start(head_project, head_project.root)
    worker = halted_worker_of(head_project.root)
    second = start(head_project, head_project.root)
    assert second.stderr is not None
    waits = any("another run is making it; waiting" in line for line in second.stderr)
    assert waits, "the second submit waits for the first"
    kill(worker, signal.SIGCONT)
    answers = []
    for process in (first, second):
        out, err = process.communicate()
        answers.append(Answer(process.returncode, out, err))
    assert [answer.code for answer in answers] == [0, 0]
    assert [answer.dispositions["head"] for answer in answers] == ["executed", "reused"]
    assert answers[0].outputs == answers[1].outputs
    with contextlib.closing(registry_of(head_project.root)) as registry:
        done = "select count(*) from executions where disposition = 'executed'"
        assert registry.execute(done).fetchone() == (1,)
