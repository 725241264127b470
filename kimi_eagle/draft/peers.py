"""Processes that share the batches of a step, one device each. Imports torch.

Every process draws the same weights, takes its part of each step's batches, and adds its gradients
to the others': since the loss of a batch is divided by the positions of the whole step, the sum is
the gradient that one process alone would have, up to the order of addition.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.artifacts.files import write_text

# What a process leaves beside the job: the figures of the first, or why one failed.
FIGURES, FAILURE = "ranks.json", "rank-failed.txt"


class RanksFailed(RuntimeError):
    """One of several processes failed; the message is its own."""


class Group:
    """The processes that torchrun started, through NCCL on GPUs and gloo on CPUs."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpu else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def add_up(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor, in place, by its sum over all processes."""
        for work in [self._dist.all_reduce(item, async_op=True) for item in tensors]:
            work.wait()

    def close(self) -> None:
        self._dist.destroy_process_group()


def launch(module: str, job: Path, devices: int) -> str:
    """Run a module with a job in so many processes; returns what the first wrote as `FIGURES`.

    Raises:
        RanksFailed: a process failed.
    """
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    done = subprocess.run([sys.executable, *command, "-m", module, str(job)], check=False)
    failure = job.parent / FAILURE
    if failure.exists():
        raise RanksFailed(failure.read_text("utf-8"))
    if done.returncode != 0:
        raise RanksFailed(
            f"one of {devices} processes ended with {done.returncode}; the log has its last words"
        )
    return (job.parent / FIGURES).read_text("utf-8")


def leave_failure(job: Path, text: str) -> None:
    write_text(job.parent / FAILURE, text)
