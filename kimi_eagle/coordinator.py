"""Who runs a run: whether its coordinator lives, and how it is asked to stop.

The registry says `running` from the moment a run begins until its coordinator says otherwise,
which one that was killed never does. The lock that a coordinator holds tells: the operating
system lets go of it when the holder dies.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kimi_eagle.artifacts.locks import held
from kimi_eagle.books import Books
from kimi_eagle.executors.protocol import ExecutorError
from kimi_eagle.orphans import orphans
from kimi_eagle.placement import execution_from, executor_of
from kimi_eagle.records import ExecutionRecord, RunRecord
from kimi_eagle.registry.store import Registry
from kimi_eagle.runner import ALIVE

RUNNING, INTERRUPTED = "running", "interrupted"
LOST = "lost"
"""The status of a run that nobody runs and nobody ended; shown, never written."""

_POLL_SECONDS = 0.1


class CannotCancel(LookupError):
    """A run cannot be cancelled; the message says why."""


def as_it_is(
    root: Path, run: RunRecord, look_again: Callable[[str], RunRecord | None]
) -> RunRecord:
    """The run, with `lost` for its status where it has no end and no coordinator."""
    if run.status != RUNNING or held(root / run.id / ALIVE):
        return run
    # It may have ended between the two looks: its end is recorded before its lock goes.
    now = look_again(run.id) or run
    return replace(now, status=LOST) if now.status == RUNNING else now


def ended_with(run: RunRecord, stages: Sequence[ExecutionRecord]) -> list[ExecutionRecord]:
    """A run's stages; what was under way in one that is lost is lost with it."""
    if run.status != LOST:
        return list(stages)
    return [
        replace(stage, disposition=LOST) if stage.disposition == RUNNING else stage
        for stage in stages
    ]


def cancel(
    root: Path, registry: Registry, run: RunRecord, seconds: float, tell: Callable[[str], None]
) -> RunRecord:
    """Ask a run's coordinator to stop, and wait until that is recorded; returns the run's end.

    A run whose coordinator is dead is given its end here, and what it gave out to a cluster is
    ended there; `tell` hears of what could not be done or written of that.

    Raises:
        CannotCancel: it has ended, its coordinator is out of reach, or it has not stopped within
            `seconds`.
    """
    run = as_it_is(root, run, registry.run)
    if run.status == LOST:
        return _bury(root, registry, run, tell)
    if run.status != RUNNING:
        raise CannotCancel(f"run {run.id} is not running: {run.status} since {run.ended_at}")
    _ask_to_stop(root, run)
    deadline = time.monotonic() + seconds
    while run.status == RUNNING:
        if time.monotonic() > deadline:
            raise CannotCancel(
                f"run {run.id} was asked to stop and has not within {seconds:g} s; "
                "cancelling it again ends its stage at once"
            )
        time.sleep(_POLL_SECONDS)
        run = as_it_is(root, registry.run(run.id) or run, registry.run)
    return _bury(root, registry, run, tell) if run.status == LOST else run


def _bury(root: Path, registry: Registry, run: RunRecord, tell: Callable[[str], None]) -> RunRecord:
    for orphan in [item for item in orphans(root) if item.run_id == run.id]:
        executor = executor_of(execution_from(orphan.note.execution))
        try:
            orphan.found(executor).cancel()
        except ExecutorError as error:
            tell(f"{orphan.note.stage} could not be cancelled: {error}")
        finally:
            executor.close()
        orphan.give_up()
    registry.abandon_running(run.id, INTERRUPTED)
    registry.end_run(run.id, INTERRUPTED)
    Books(root, registry, tell).close(run.id)
    return registry.run(run.id) or run


def _ask_to_stop(root: Path, run: RunRecord) -> None:
    """Raises: CannotCancel when the process with the recorded id is not the coordinator."""
    if run.host != socket.gethostname():
        raise CannotCancel(f"run {run.id} is coordinated on {run.host}: cancel it there")
    # A handle on the process first, so that its id cannot come to mean another in between.
    try:
        handle = os.pidfd_open(run.pid)
    except OSError:
        handle = None
    try:
        if handle is None or not _holds(run.pid, root / run.id / ALIVE):
            with suppress(OSError):
                if not held(root / run.id / ALIVE):
                    return  # it has just ended
            raise CannotCancel(
                f"run {run.id} is coordinated by a process that cannot be reached from here "
                f"(process {run.pid} is not it): it runs in another container or as another user"
            )
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    finally:
        if handle is not None:
            os.close(handle)


def _holds(pid: int, path: Path) -> bool:
    """Whether a process has the file open."""
    try:
        wanted = path.stat()
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for entry in entries:
        with suppress(OSError):
            if os.path.samestat(entry.stat(), wanted):
                return True
    return False
