"""What it costs to give work out, and what a second worker brings.

    python benchmarks/fanout.py [--tasks 20] [--ray ADDRESS] [--slurm] [--record]

Overhead: a task that does nothing, from its submission until its end is known, one after the
other, beside the same command as a bare subprocess; on this machine, and where one is named in a
Ray cluster and in Slurm. Scaling: hidden states of the demo's chats with the `transformers`
engine, the rows shared out over one worker and over two of one thread each; the time is the
stage's own, with the start of its processes.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import KIMI_EAGLE, Figures, parser

from kimi_eagle.executors.local import LocalExecutor
from kimi_eagle.executors.protocol import Executor, Task
from kimi_eagle.executors.ray import RayExecutor
from kimi_eagle.executors.slurm import SlurmExecutor, SlurmSettings

DEMO = Path(importlib.import_module("kimi_eagle").__file__ or "").parent / "demo"
NOTHING = ("-c", "pass")

MANIFEST = """\
version: 1
name: fanout
verifier: {{path: {verifier}}}
stages:
  rows: {{kind: prepare, sources: [{{path: chats.jsonl}}], max_length: 512, val_ratio: 0.1}}
  states: {{kind: extract, rows: rows, engine: {{kind: transformers}}}}
"""


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--tasks", type=int, default=20, metavar="N")
    options.add_argument("--ray", metavar="ADDRESS", help="of a cluster that is there")
    options.add_argument("--slurm", action="store_true", help="submit to Slurm too")
    options.add_argument("--rows", type=int, default=400, metavar="N", help="chats to extract")
    options.add_argument("--repeat", type=int, default=3, metavar="N", help="the best of N counts")
    given = options.parse_args()
    figures = Figures(given)
    executors: dict[str, Executor] = {"local": LocalExecutor()}
    if given.ray:
        executors["ray"] = RayExecutor(given.ray)
    if given.slurm:
        executors["slurm"] = SlurmExecutor(SlurmSettings())
    bare = min(_bare() for _ in range(given.tasks))
    for name, executor in executors.items():
        # On a file system that nodes share, where the current folder is on one.
        with tempfile.TemporaryDirectory(prefix=".fanout-", dir=Path.cwd()) as folder:
            _task(executor, Path(folder))  # the first one connects
            taken = sorted(_task(executor, Path(folder)) for _ in range(given.tasks))
        executor.close()
        median = taken[len(taken) // 2]
        figures.emit(f"fanout_task_{name}", median, "s", bare, tasks=given.tasks, best=taken[0])
    _scaling(figures, given.rows, given.repeat)


def _bare() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *NOTHING], check=True)
    return time.perf_counter() - started


def _task(executor: Executor, top: Path) -> float:
    """Seconds from the submission of a task until its end is known."""
    name = f"bench-{secrets.token_hex(6)}"
    folder = top / name
    folder.mkdir()
    started = time.perf_counter()
    running = executor.submit(Task(name, NOTHING, folder, folder / "log", folder / "usage.json"))
    while (code := running.poll()) is None:
        time.sleep(0.005)
    if code != 0:
        raise SystemExit(f"{name} ended with {code}: {(folder / 'log').read_text()}")
    return time.perf_counter() - started


def _scaling(figures: Figures, rows: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory(prefix="fanout-") as folder:
        top = Path(folder)
        (top / "chats.jsonl").write_text(_chats(rows), "utf-8")
        (top / "manifest.yaml").write_text(MANIFEST.format(verifier=DEMO / "verifier"), "utf-8")
        _submit(top, 1, "{rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 512, "
                "val_ratio: 0.1}}")  # fmt: skip
        taken: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        # In turns: what else the machine does meets both alike.
        for _ in range(repeat):
            for workers in taken:
                shutil.rmtree(top / "again", ignore_errors=True)
                shutil.copytree(top / "runs", top / "again")
                taken[workers].append(_submit(top, workers, None, root="again"))
        best = {n: min(items, key=lambda item: item["seconds"]) for n, items in taken.items()}
        if best[1]["outputs"] != best[2]["outputs"]:
            raise SystemExit("two workers made other hidden states than one")
        for workers, stage in best.items():
            figures.emit(
                f"fanout_extract_{workers}",
                stage["metrics"]["tokens_extracted"] / stage["seconds"],
                "tokens/s",
                best[1]["metrics"]["tokens_extracted"] / best[1]["seconds"],
                seconds=stage["seconds"],
                rows=stage["metrics"]["rows"],
            )


def _chats(count: int) -> str:
    """Chats of several of the demo's in a row each, so that rows have a length that counts."""
    draw = random.Random(0)
    demo = [json.loads(line) for line in (DEMO / "chats.jsonl").read_text("utf-8").splitlines()]
    lines = []
    for _ in range(count):
        some = draw.sample(demo, 6)
        lines.append(json.dumps({"messages": [m for chat in some for m in chat["messages"]]}))
    return "\n".join(lines) + "\n"


def _submit(top: Path, workers: int, stages: str | None, root: str = "runs") -> dict[str, Any]:
    """The last stage of a submit, as it came out."""
    settings = [f"stages={stages}"] if stages else [f"stages.states.resources.workers={workers}"]
    command = [*KIMI_EAGLE, "--root", str(top / root), "submit", str(top / "manifest.yaml")]
    done = subprocess.run(
        [*command, "--json", *(part for item in settings for part in ("--set", item))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout)["stages"][-1])


if __name__ == "__main__":
    main()
