"""End a program whose engine has gone. Imports no engine.

An engine is a process beside the program. When it is killed (by a system that is out of memory,
most often), vLLM's client waits for its next answer for ever.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kimi_eagle.job import StageFailed

# How soon it is noticed, and how long the engine's client is given to say so itself: its own words
# are better.
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0


class EngineDied(StageFailed):
    """A process of the engine has ended while it was wanted. Nothing can be taken down in order."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch the processes that this one starts by `multiprocessing`. In the main thread.

    Raises: EngineDied, wherever the program is then.
    """
    children: set[Any] = set()
    ended = threading.Event()
    said: list[str] = []

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            children.update(multiprocessing.active_children())
            gone = [child for child in children if not child.is_alive() and child.exitcode]
            if gone:
                how = how_it_ended(f"the engine's process {gone[0].name}", gone[0].exitcode)
                said.append(f"{how}; see the log of the stage")
                if not ended.wait(_GRACE_SECONDS):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    def interrupt(_number: int, _frame: object) -> None:
        raise EngineDied(said[0])

    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=watch, name="engine-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGUSR1, before)


def how_it_ended(process: str, code: int | None) -> str:
    """In words, by its exit code: `vllm was ended by SIGKILL; the machine may be out of memory`."""
    if code is not None and code < 0:
        why = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
        return f"{process} was ended by {signal.Signals(-code).name}{why}"
    return f"{process} ended with code {code}"
