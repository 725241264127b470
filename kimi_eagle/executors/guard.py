"""Keeps a stage from outliving its coordinator. Standard library only; run as a program.

The coordinator starts this, as the leader of a process group of its own, with a pipe for
standard input that it never writes to. This starts the worker in the same group. When the
coordinator dies, in whatever way, the pipe ends, and the whole group is killed: the worker, and
engine processes that would otherwise go on without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    # An interrupt or a request to end is the worker's to answer; this one stays until it is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen(
        [sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL, preexec_fn=_defaults
    )
    threading.Thread(target=_watch, daemon=True).start()
    code = worker.wait()
    return 128 - code if code < 0 else code


def _defaults() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
