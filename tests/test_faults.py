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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import HEAD, LIGHT, Answer, Project, halted_worker_of, kill, wait_for, workers

from kimi_eagle.identity import digest_file, digest_tree

SEED = 20261201
AT_ONCE = 2


# What must hold after any fault


def start(project: Project, root: Path) -> subprocess.Popen[str]:
    """A submit in a session of its own, under a root of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "--root", str(root)]
        + ["submit", str(project.manifest), "--json"],
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
                links = [os.readlink(link) for link in (entry / "fd").iterdir()]
                if any(link.startswith(f"{root}/") for link in links):
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


def of_runner(process: subprocess.Popen[str], root: Path, moment: float) -> bool:
    time.sleep(moment)
    return process.poll() is None and strike(process.pid)


def of_everything(process: subprocess.Popen[str], root: Path, moment: float) -> bool:
    """The runner's group, and the group of its stage, as a machine that goes down would."""
    time.sleep(moment)
    groups = set()
    for pid in workers(root):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    struck = process.poll() is None and strike(process.pid, os.killpg)
    for group in groups - {os.getpgrp()}:
        strike(group, os.killpg)
    return struck


def of_worker(process: subprocess.Popen[str], root: Path, moment: float) -> bool:
    while process.poll() is None:
        for pid, line in workers(root).items():
            if not line[1].endswith("guard.py"):
                time.sleep(moment)
                return strike(pid)
        time.sleep(0.002)
    return False


KILLS = {"runner": of_runner, "everything": of_everything, "worker": of_worker}


class Strikes:
    """Kills runs of one manifest, each under a root of its own, at most two at once."""

    def __init__(self, project: Project, folder: Path):
        self.project = project
        self._folder = folder
        self._names = itertools.count()
        answers: list[tuple[Answer, float]] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda _: self._unbroken(), range(2 * AT_ONCE)))
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
        struck = KILLS[kind](process, root, moment)
        out, err = process.communicate()
        wrong = []
        if kind == "worker" and struck:
            if process.returncode != 1 or "was ended by signal 9" not in err:
                wrong.append(f"the run ended with {process.returncode}: {err}")
        elif struck and process.returncode != -signal.SIGKILL:
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
    from conftest import new_project

    folder = tmp_path_factory.mktemp("strikes")
    return Strikes(new_project(folder / "project", HEAD), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("runner", 80), ("everything", 60), ("worker", 60)])
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
    wrong = strikes.at("runner", moments(6, strikes.life))
    wrong += strikes.at("worker", moments(4, strikes.work / 3))
    assert wrong == []
