"""Processes that share the batches of a step, one device each. Imports torch.

Every process draws the same weights and takes its part of each step's batches. Every parameter has
an owner, who adds the gradients of all up, holds the state of its optimizer, takes the step, and
hands the new values out: since the loss of a batch is divided by the positions of the whole step,
the sum is the gradient that one process alone would have, up to the order of addition. So much is
sent as if all added all gradients up, and the optimizer's time and memory are shared.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.artifacts.files import write_text
from kimi_eagle.nodes import ADDRESS, here
from kimi_eagle.parent import end_with

# What a process leaves beside the job: the figures of the first, or why one failed, and where
# those of several nodes meet.
FIGURES, FAILURE, MEETING = "ranks.json", "rank-failed.txt", "meeting.txt"
# How long a shared file system may take to show a file, and a node longer than another to begin.
_APPEAR_SECONDS = 300.0


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
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def add_up(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor, in place, by its sum over all processes."""
        for work in [self._dist.all_reduce(item, async_op=True) for item in tensors]:
            work.wait()

    def to_owners(self, tensors: Sequence[Any], owners: Sequence[int]) -> None:
        """Replace each tensor, in place and at its owner alone, by its sum over all processes."""
        given = zip(tensors, owners, strict=True)
        for work in [self._dist.reduce(item, owner, async_op=True) for item, owner in given]:
            work.wait()

    def from_owners(self, tensors: Sequence[Any], owners: Sequence[int]) -> None:
        """Replace each tensor, in place, by its owner's."""
        given = zip(tensors, owners, strict=True)
        for work in [self._dist.broadcast(item, owner, async_op=True) for item, owner in given]:
            work.wait()

    def gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of all processes, at the first, on the CPU; nothing elsewhere."""
        own = {name: item.detach().cpu().contiguous() for name, item in tensors.items()}
        layouts: list[Any] = [None] * self.size
        layout = [(name, item.shape, item.dtype) for name, item in own.items()]
        self._dist.all_gather_object(layouts, layout)
        if self.rank != 0:
            for item in own.values():
                self._dist.send(item, 0)
            return {}
        for rank in range(1, self.size):
            for name, shape, dtype in layouts[rank]:
                own[name] = torch.empty(shape, dtype=dtype)
                self._dist.recv(own[name], rank)
        return own

    def agreed(self, said: bool) -> bool:
        """What the first process says. Waits for no device."""
        word = torch.tensor([said])
        self._dist.broadcast(word, 0)
        return bool(word)

    def close(self) -> None:
        self._dist.destroy_process_group()


def launch(module: str, job: Path, devices: int, nodes: int = 1) -> str:
    """Run a module with a job in so many processes on each node, those of this one being started
    here; returns what the first of all wrote as `FIGURES`.

    Raises:
        RanksFailed: a process failed.
    """
    meeting = _meeting(job.parent, nodes) if nodes > 1 else ["--standalone"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}"),
            *(*meeting, "-m", module, str(job)),
        ],
        check=False,
        preexec_fn=functools.partial(end_with, os.getpid()),
    )
    failure = job.parent / FAILURE
    if failure.exists():
        raise RanksFailed(failure.read_text("utf-8"))
    if done.returncode < 0 and nodes > 1:
        # Not the training's own failure: whoever looks after this process is to see that.
        os.kill(os.getpid(), -done.returncode)
    if done.returncode != 0:
        raise RanksFailed(
            f"one of {devices * nodes} processes ended with {done.returncode}; "
            "the log has its last words"
        )
    return _appeared(job.parent / FIGURES)


def _meeting(folder: Path, nodes: int) -> list[str]:
    """How torchrun finds those of the other nodes: on the first, which says where that is.

    Raises: RanksFailed: it did not say.
    """
    address = os.environ.get(ADDRESS) or socket.gethostname()
    first = here() == 0
    if first:
        with socket.socket() as free:
            free.bind(("", 0))
            write_text(folder / MEETING, f"{address}:{free.getsockname()[1]}")
    endpoint = _appeared(folder / MEETING)
    return [
        f"--nnodes={nodes}",
        f"--rdzv-id={folder.name}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={int(first)}",
        f"--local-addr={address}",
    ]


def _appeared(path: Path) -> str:
    """What a process wrote, maybe on another node, once it shows here.

    Raises: RanksFailed: it does not.
    """
    deadline = time.monotonic() + _APPEAR_SECONDS
    while True:
        try:
            return path.read_text("utf-8")
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise RanksFailed(
                    f"{path.name} of another node did not show in {path.parent} within "
                    f"{_APPEAR_SECONDS:.0f} s: is that a file system that all nodes share?"
                ) from None
        time.sleep(0.1)


def leave_failure(job: Path, text: str) -> None:
    write_text(job.parent / FAILURE, text)
