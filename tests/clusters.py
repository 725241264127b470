"""What tests of clusters share: an extraction that is halted midway."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from conftest import WITH_STATES, Project, wait_for, workers

ROWS_AND_STATES = """\
version: 1
name: states
verifier: {path: verifier}
stages:
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 512, val_ratio: 0.2}
  states: {kind: extract, rows: rows, engine: {kind: transformers}, shard_bytes: 100000}
"""


# Of the project with hidden states: two processes, wherever each is.
TWO_PROCESSES = (
    WITH_STATES
    + """\
  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 2, lr: 1e-3,
          batch_tokens: 128, accumulate: 2, noise: {std: 0.05}, save_steps: 2}
"""
)
ON_ONE = ("--set", "stages.draft.devices=2")
ON_TWO_NODES = ("--set", "stages.draft.resources={nodes: 2}")


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


def trained_by_two(extracted: Project, *arguments: str) -> dict[str, str]:
    """The outputs of a training by two processes, of hidden states that are there already."""
    extracted.write(TWO_PROCESSES)
    answer = extracted.submit(*arguments)
    assert answer.code == 0, answer.err
    assert answer.dispositions["states"] == "reused"
    (metrics,) = (s["metrics"] for s in answer.json["stages"] if s["name"] == "draft")
    assert metrics["devices"] == 2
    return answer.outputs["draft"]
