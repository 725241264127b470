"""A request to end, made an exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """The user asked the run to stop."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn a request to end (SIGTERM) into the same orderly stop as ctrl-c."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
