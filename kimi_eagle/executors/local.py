"""Run tasks on this machine, each as a process group that ends with the coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from kimi_eagle.executors.gpus import Claims, visible
from kimi_eagle.executors.protocol import ExecutorError, Handle, Needs, Node, Offer, Task

# What ends by itself on SIGTERM gets this long before it is killed.
GRACE_SECONDS = 10.0


class LocalTask:
    """A task that runs, or ran, here; it begins when the GPUs that it needs are free."""

    def __init__(self, task: Task, claims: Claims):
        self._task = task
        self._claims = claims
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._begin()

    @property
    def handle(self) -> Handle:
        return {}

    def waiting(self) -> str | None:
        if self._process is not None:
            return None
        count = self._task.needs.gpus
        return f"waiting for {count} free GPU{'s' * (count != 1)} of this machine"

    def poll(self) -> int | None:
        if self._process is None and not self._begin():
            return None
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            self._end_group()
        return code

    def cancel(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            while self._process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:  # an impatient second interrupt included
            self._end_group()
        self._process.wait()

    def _begin(self) -> bool:
        """Start it, if it need not wait; tells whether it runs."""
        task, held = self._task, self._claims.take(self._task.needs.gpus)
        if held is None:
            return False
        settings = dict(task.settings)
        if held:
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(held)
        guard = Path(__file__).with_name("guard.py")
        self._log = task.log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(guard), str(task.usage), *task.arguments],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **settings},
                # The guard holds the GPUs: they are free when the last of its group is gone.
                pass_fds=tuple(held.values()),
            )
        finally:
            for descriptor in held.values():
                os.close(descriptor)
        return True

    def _end_group(self) -> None:
        assert self._process is not None
        # Engines leave processes behind when their parent goes: the group ends with the job.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._log is not None:
            self._log.close()


class LocalExecutor:
    """Starts tasks as subprocesses under a guard (see `executors.guard`)."""

    name = "local"
    remote = False

    def __init__(self, gpus: Sequence[str] | None = None):
        """Args: `gpus`: the ids of those that may be used; None for all that are visible."""
        self._given = gpus
        self._found: tuple[str, ...] | None = None

    def _gpus(self) -> tuple[str, ...]:
        if self._found is None:
            self._found = visible() if self._given is None else tuple(self._given)
        return self._found

    def offer(self) -> Offer:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        cpus = len(os.sched_getaffinity(0))
        return Offer((Node("this machine", cpus, len(self._gpus()), pages * size),))

    def room(self, needs: Needs, beside: list[Needs]) -> bool:
        """What says what it needs shares the machine; what does not has it to itself."""
        if not beside:
            return True
        together = [needs, *beside]
        (node,) = self.offer().nodes
        return (
            all(item.cpus for item in together)
            and sum(item.cpus or 0 for item in together) <= node.cpus
            and sum(item.gpus for item in together) <= node.gpus
            and sum(item.memory_bytes or 0 for item in together) <= node.memory_bytes
        )

    def submit(self, task: Task) -> LocalTask:
        return LocalTask(task, Claims(self._gpus() if task.needs.gpus else ()))

    def find(self, task: Task, handle: Handle) -> LocalTask:
        raise ExecutorError(f"{task.name} ran beside its coordinator and ended with it")

    def close(self) -> None:
        """Tasks here are their coordinator's, and it ends them."""
