"""Keeps a stage from outliving its coordinator. Standard library only; run as a program.

The coordinator starts this, as the leader of a process group of its own, with a pipe for
standard input that it never writes to. This starts the worker in the same group. When the
coordinator dies, in whatever way, the pipe ends, and the whole group is killed: the worker, and
engine processes that would otherwise go on without it. When this one dies too, the kernel kills
the worker.

Its first argument names a file for what the worker used of the machine; the others are the
worker's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    # An interrupt or a request to end is the worker's to answer; this one stays until it is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    usage, *arguments = sys.argv[1:]
    worker = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        preexec_fn=functools.partial(_at_birth, os.getpid()),
    )
    threading.Thread(target=_watch, daemon=True).start()
    code = worker.wait()
    _account(usage)
    return 128 - code if code < 0 else code


def _account(path: str) -> None:
    """Write what the worker and the processes it waited for have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
        "peak_memory_bytes": used.ru_maxrss * 1024,
    }
    # On a full disk the figures are lost; the exit code must not be.
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file)


def _at_birth(parent: int) -> None:
    """Between fork and exec of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
