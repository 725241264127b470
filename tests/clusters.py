"""What tests of clusters share: an extraction that is halted midway."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from conftest import Answer, Project, is_guard, wait_for, workers

ROWS_AND_STATES = """\
version: 1
name: states
verifier: {path: verifier}
stages:
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 512, val_ratio: 0.2}
  states: {kind: extract, rows: rows, engine: {kind: transformers}, shard_bytes: 100000}
"""


ON_TWO_NODES = "stages.draft.resources={nodes: 2}"


@contextmanager
def extracting(project: Project) -> Iterator[int]:
    """Wait until an extraction has closed its first shard and halt it there, guard and all; it goes
    on afterwards, where it still is. Gives its process group."""

    def group() -> int | None:
        lines = workers(project.root)
        of_states = (pid for pid, line in lines.items() if any("-states-" in p for p in line))
        return next((os.getpgid(pid) for pid in of_states), None)

    found = int(wait_for(group, "an extraction"))
    wait_for(lambda: list(project.root.glob(".staging/*/shards/journal-*")), "its engine")
    deadline = time.monotonic() + 60
    # In slices, or so small an extraction would be over before anybody looks.
    while not list((project.root / "states").glob("*/*.safetensors")):
        assert time.monotonic() < deadline, "no shard in 60 s"
        os.killpg(found, signal.SIGCONT)
        time.sleep(0.03)
        os.killpg(found, signal.SIGSTOP)
        time.sleep(0.06)  # a coordinator takes in what is there
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(found, signal.SIGCONT)


@contextmanager
def training(project: Project) -> Iterator[dict[int, list[int]]]:
    """Wait until a training on two nodes has saved twice, and halt it on the second; it goes on
    afterwards, where it still is. Gives the processes of each node, guards first."""

    def saved() -> int:
        events = project.root.glob(".staging/*/events.ndjson")
        return sum(path.read_text("utf-8").count('"snapshot"') for path in events)

    wait_for(lambda: saved() > 1, "snapshots")
    found: dict[int, list[int]] = {0: [], 1: []}
    for pid, line in workers(project.root).items():
        said = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        node = next((part for part in said if part.startswith("KIMI_EAGLE_NODE=")), None)
        if node is not None:
            found[int(node[-1])].insert(0 if any(map(is_guard, line)) else 9, pid)
    halted = found[1][1:]
    for pid in halted:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield found
    finally:
        for pid in halted:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_for_their_end(project: Project, processes: dict[int, list[int]]) -> None:
    """Until none is left of what a task had started on any node."""
    started = set(chain(*processes.values()))
    wait_for(lambda: not started & workers(project.root).keys(), "the end of all nodes' processes")


def require_gone_on(project: Project, answer: Answer, unbroken: Answer) -> None:
    """That a training whose node died went on from a snapshot, to the bytes of an unbroken one."""
    assert answer.code == 0, answer.err
    assert answer.dispositions["states"] == "reused"
    (metrics,) = (stage["metrics"] for stage in answer.json["stages"] if stage["name"] == "draft")
    assert metrics["devices"] == 2
    assert metrics["steps_run"] < metrics["steps"]
    assert answer.outputs == unbroken.outputs
    assert not workers(project.root)
    assert not list((project.root / ".staging").iterdir())
