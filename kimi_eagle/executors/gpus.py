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
    return tuple(_asked("index"))


def least_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; None where there is none, or nobody says."""
    try:
        return min((int(mib) << 20 for mib in _asked("memory.total")), default=None)
    except ValueError:
        return None


def _asked(what: str) -> list[str]:
    """A property of each GPU of this machine, as the driver's own tool says it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


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
