"""Keeps a stage from outliving whom it works for. Standard library only; run as a program.

    guard.py USAGE ARGUMENTS…                 beside a coordinator, on its machine
    guard.py --folder FOLDER USAGE ARGUMENTS… for a scheduler, on any machine

It is started as the leader of a process group, and starts the worker in the same group. When
whom it works for is gone, the whole group is killed: the worker, and engine processes that would
otherwise go on without it. When this one dies too, the kernel kills the worker.

That shows on standard input, where this is a pipe that nothing is ever written to: it ends with
its holder, however that dies. For a scheduler it shows in FOLDER too, the job's own: an attempt
that was given up has none any more. There it also leaves a sign of life, and what became of the
worker, which no scheduler remembers for long.

Where a stage has several nodes there is a guard on each, told by its environment which one it is.
They share FOLDER, and each leaves files of its own there. When a worker has failed the others end
theirs. One that has said how its worker ended has no failure of its own: it ends with 0, so that
only what is gone without a word looks like that to a scheduler.

USAGE names a file for what the worker used of the machine; ARGUMENTS are the worker's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

HEARTBEAT, EXIT = "heartbeat", "exit.json"
BEAT_SECONDS = 2.0
# Those of `kimi_eagle.nodes`, which a program of its own does not import.
NODE = int(os.environ.get("KIMI_EAGLE_NODE", "0"))
NODES = int(os.environ.get("KIMI_EAGLE_NODES", "1"))
# A worker whose peers fail mostly fails itself, and then says more than that it was ended.
PEER_SECONDS = 10.0


def _watch_input() -> None:
    while os.read(0, 1024):
        pass
    _end_group()


def of_node(name: str, node: int) -> str:
    """What a file of the first node is called for another."""
    stem, dot, ending = name.rpartition(".")
    return name if node == 0 else f"{stem}-{node}.{ending}" if dot else f"{name}-{node}"


def _beat(folder: str) -> None:
    while True:
        try:
            # Not created anew: a folder that comes to lack it was given up.
            descriptor = os.open(_own(folder, HEARTBEAT), os.O_WRONLY)
            os.utime(descriptor)
            os.close(descriptor)
        except FileNotFoundError:
            _end_group()
        except OSError:
            pass  # a file system that is away for a while
        time.sleep(BEAT_SECONDS)


def _watch_peers(folder: str, worker: subprocess.Popen[bytes], ended: list[int]) -> None:
    """Args: `ended` comes to hold the number of the node because of which the worker was ended."""
    others = [node for node in range(NODES) if node != NODE]
    while True:
        for node in others:
            with contextlib.suppress(OSError, ValueError):
                with open(os.path.join(folder, of_node(EXIT, node)), encoding="utf-8") as file:  # noqa: PTH118
                    code = json.load(file)["code"]
                if code != 0:
                    time.sleep(PEER_SECONDS)
                    ended.append(node)
                    worker.kill()
                    return
        time.sleep(BEAT_SECONDS)


def _own(folder: str, name: str) -> str:
    return os.path.join(folder, of_node(name, NODE))  # noqa: PTH118


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    # An interrupt or a request to end is the worker's to answer; this one stays until it is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arguments = sys.argv[1:]
    folder = None
    if arguments[0] == "--folder":
        folder, arguments = arguments[1], arguments[2:]
    usage, *arguments = arguments
    if folder is not None:
        with open(_own(folder, HEARTBEAT), "w", encoding="utf-8"):
            pass
        threading.Thread(target=_beat, args=(folder,), daemon=True).start()
    worker = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        preexec_fn=functools.partial(_at_birth, os.getpid()),
    )
    because: list[int] = []
    if folder is not None and NODES > 1:
        watched = (folder, worker, because)
        threading.Thread(target=_watch_peers, args=watched, daemon=True).start()
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_watch_input, daemon=True).start()
    code = worker.wait()
    code = 128 - code if code < 0 else code
    used = _account()
    # On a full disk the figures are lost; the exit code must not be.
    with contextlib.suppress(OSError):
        _write(of_node(usage, NODE), used)
    if folder is None:
        return code
    said = {"code": code, "host": socket.gethostname()}
    _write(_own(folder, EXIT), {**said, "because": because[0]} if because else said)
    return code if NODES == 1 else 0


def _account() -> dict[str, object]:
    """What the worker and the processes it waited for have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
        "peak_memory_bytes": used.ru_maxrss * 1024,
    }


def _write(path: str, value: object) -> None:
    """Whole or not at all."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(f"{path}.part", path)  # noqa: PTH105


def _at_birth(parent: int) -> None:
    """Between fork and exec of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
