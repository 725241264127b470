"""Work on a stream in several processes, and take the results in the stream's order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import Any, TypeVar

from kimi_eagle.parent import end_with

T = TypeVar("T")
R = TypeVar("R")

_work: Callable[[Any], Any] | None = None
"""What the processes do: they are forked with it, tokenizer and all, so that it is loaded once."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def in_order(items: Iterable[T], work: Callable[[T], R], processes: int) -> Iterator[tuple[T, R]]:
    """Each item with what `work` makes of it, in order; a few items ahead are read, no more.

    One item, or one process, is worked on here: then nothing is forked.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a process was killed.
    """
    stream = iter(items)
    first = list(islice(stream, 2))
    stream = chain(first, stream)
    if processes <= 1 or len(first) < 2:
        for item in stream:
            yield item, work(item)
        return
    global _work
    _work = work
    # Forked processes have the tokenizer already, in memory that they share.
    context = multiprocessing.get_context("fork")
    waiting: deque[tuple[T, Future[R]]] = deque()
    with ProcessPoolExecutor(processes, context, end_with, (os.getpid(),)) as pool:
        try:
            for item in stream:
                waiting.append((item, pool.submit(_call, item)))
                if len(waiting) > 2 * processes:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            _work = None


def _call(item: Any) -> Any:
    assert _work is not None
    return _work(item)
