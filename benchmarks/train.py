"""How fast a draft trains: our loop beside speculators' own, on the same rows and optimizer.

    python benchmarks/train.py           # the demo's rows, on a CPU
    python benchmarks/train.py --real    # Kimi-K2.5's dimensions, made-up rows, on one GPU
    python benchmarks/train.py --seeds 3 # how well what either trains fits rows it has not seen

Each side is a process of its own (`train_side.py`), warms up, and is timed over whole steps with
one wait for the device before and one after; on a CPU time is that of the processor. Tokens are
positions that are no padding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import Figures, parser

from kimi_eagle.stages.train.spec import Train

SIDE = Path(__file__).with_name("train_side.py")
# Dense bf16 of one H200, without sparsity; of a CPU nothing is claimed.
PEAK_FLOPS = 989.5e12


@dataclass(frozen=True)
class Setup:
    """What both sides train, and how long they are timed."""

    folder: str
    rows: int
    batch_tokens: int
    draft_vocab: int
    real: bool
    optimizers: tuple[str, ...]
    warm_up: int
    steps: int
    profiled: int
    """Further steps of speculators', each waited for, which is how it tells its phases apart."""
    workers: int
    compiled: bool = True
    attention: str = "auto"
    their_loss: str = "eager"
    lr: float = 1e-4
    seeds: int = 0

    @property
    def total(self) -> int:
        return self.warm_up + self.steps + self.profiled


def main() -> int:
    options = _options()
    figures = Figures(options)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        started = time.perf_counter()
        setup = _real(options, folder) if options.real else _demo(options, folder)
        path = Path(folder) / "setup.json"
        path.write_text(json.dumps(asdict(setup)), "utf-8")
        _run(["make", str(path)])
        figures.emit("train_data_made", time.perf_counter() - started, "s")
        if options.seeds:
            _emit_losses(figures, setup, _run(["losses", str(path)]))
            return 0
        found = {}
        for side in options.sides.split(","):
            started = time.perf_counter()
            found[side] = _run([side, str(path)])
            if found[side] is None and side == "ours" and setup.compiled:
                # What a user would get there: see `kimi_eagle.draft.compute.that_works`.
                setup = replace(setup, compiled=False)
                path.write_text(json.dumps(asdict(setup)), "utf-8")
                found[side] = _run([side, str(path)])
            figures.emit(f"train_{side}_whole", time.perf_counter() - started, "s")
        for optimizer in setup.optimizers:
            _emit(figures, setup, optimizer, found)
    return 0


def _emit(figures: Figures, setup: Setup, optimizer: str, found: dict[str, Any]) -> None:
    ours, theirs = ((found.get(side) or {}).get(optimizer) for side in ("ours", "theirs"))
    where = {"optimizer": optimizer, "real": setup.real}
    if ours and theirs:
        speeds = ours["tokens_per_second"], theirs["tokens_per_second"]
        figures.emit("train_vs_speculators", speeds[0], "tokens/s", speeds[1], **where)
        if optimizer == setup.optimizers[0]:  # with the weights that both sides begin with
            losses = ours["first_loss"], theirs["first_loss"]
            figures.emit("train_first_loss", losses[0], "nats", losses[1], **where)
    for side, one in (("ours", ours), ("theirs", theirs)):
        if not one:
            continue
        speed = one["tokens_per_second"]
        figures.emit(f"train_tokens_per_second_{side}", speed, "tokens/s", **where)
        figures.emit(f"train_step_{side}", one["step_ms"], "ms", **where)
        for phase, value in one["phases"].items():
            figures.emit(f"train_{phase}_{side}", value, "ms", **where)
        if one["peak_bytes"]:
            figures.emit(f"train_peak_memory_{side}", one["peak_bytes"] / 1e9, "GB", **where)
        if setup.real:
            # The work of the model as it is defined, however a side goes about it.
            share = speed * one["flops_per_token"] / PEAK_FLOPS
            figures.emit(f"train_mfu_{side}", share, "of 989.5 TFLOP/s", **where)


def _emit_losses(figures: Figures, setup: Setup, found: Any) -> None:
    ours, theirs = found["ours"], found["theirs"]
    middle, beside = statistics.mean(ours), statistics.mean(theirs)
    where = {"optimizer": setup.optimizers[0], "steps": setup.steps, "lr": setup.lr}
    figures.emit(
        "train_validation_loss", middle, "nats", beside, **where, seeds=ours, their_seeds=theirs
    )


def _run(arguments: list[str]) -> Any:
    """Run one part in a process of its own; what it prints last is its answer."""
    command = [sys.executable, str(SIDE), *arguments]
    settings = Train.settings if arguments[0] == "ours" else {}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        print(done.stderr[-6000:], file=sys.stderr)
        print(json.dumps({"name": f"train_{arguments[0]}_failed", "value": done.returncode}))
        if arguments[0] == "make":
            raise SystemExit(1)
        return None
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None


def _demo(options: argparse.Namespace, folder: str) -> Setup:
    optimizers = tuple((options.optimizers or "adamw").split(","))
    setup = Setup(
        folder, 0, 1024, 512, False, optimizers, 3, options.steps or 20, 3, 0, compiled=False
    )
    if not options.seeds:
        return setup
    return replace(setup, seeds=options.seeds, lr=2e-3, steps=options.steps or 120)


def _real(options: argparse.Namespace, folder: str) -> Setup:
    optimizers = tuple((options.optimizers or "muon,adamw").split(","))
    steps = options.steps or 10
    return Setup(
        folder,
        8 * (5 + steps + 2),
        8192,
        32000,
        True,
        optimizers,
        5,
        steps,
        2,
        8,
        compiled=not options.no_compile,
        attention=options.attention,
        their_loss=options.their_loss,
    )


def _options() -> argparse.Namespace:
    found = parser(__doc__.splitlines()[0])
    found.add_argument("--real", action="store_true", help="Kimi-K2.5's dimensions, on a GPU")
    found.add_argument("--steps", type=int, help="steps that are timed, or taken with --seeds")
    found.add_argument("--seeds", type=int, help="compare losses after training with so many seeds")
    found.add_argument("--optimizers", help="adamw, muon, or both with a comma")
    found.add_argument("--sides", default="ours,theirs")
    found.add_argument("--attention", default="auto", help="ours: flex, sdpa or eager")
    found.add_argument("--no-compile", action="store_true", help="ours: no compiled kernels")
    found.add_argument("--their-loss", default="eager", help="speculators': eager or fused")
    found.add_argument("--scratch", help="where the rows are written; 12 GB with --real")
    return found.parse_args()


if __name__ == "__main__":
    sys.exit(main())
