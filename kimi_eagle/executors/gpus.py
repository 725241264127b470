"""GPUs of this machine: which there are, and who uses them now.

A GPU is in use as long as somebody holds a lock on its file, so that coordinators that know
nothing of each other never share one, and one that dies lets go of it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def visible() -> tuple[str, ...]:
    """The GPUs that this process may use, by the ids that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() not in ("", "-1"))
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(done.stdout.split()) if done.returncode == 0 else ()


def least_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; None where there is none, or nobody says."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        sizes = [int(line) << 20 for line in done.stdout.split()] if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return min(sizes, default=None)


class Claims:
    """GPUs that are ours."""

    def __init__(self, ids: Sequence[str]):
        self._ids = ids
        self._folder = Path(tempfile.gettempdir()) / f"kimi-eagle-gpus-{os.getuid()}"

    def take(self, count: int) -> dict[str, int] | None:
        """That many GPUs that nobody uses, each with the descriptor that holds it until it is
        closed; None when there are not enough, and then none is held."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        held: dict[str, int] = {}
        for gpu in self._ids:
            if len(held) == count:
                break
            name = gpu.replace(os.sep, "_")
            descriptor = os.open(
                self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            held[gpu] = descriptor
        if len(held) == count:
            return held
        for descriptor in held.values():
            os.close(descriptor)
        return None
