"""Run a job on this machine, as a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# What ends by itself on SIGTERM gets this long before it is killed.
GRACE_SECONDS = 10.0


class LocalJob:
    """A job that runs, or ran, here."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]):
        self._process = process
        self._log = log

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._end_group()
        return code

    def cancel(self) -> None:
        """End the job and everything it started."""
        if self._process.returncode is not None:
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

    def _end_group(self) -> None:
        # Engines leave processes behind when their parent goes: the group ends with the job.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()


class LocalExecutor:
    """Starts jobs as subprocesses under a guard (see `executors.guard`)."""

    def submit(
        self, arguments: Sequence[str], log: Path, usage: Path, settings: Mapping[str, str]
    ) -> LocalJob:
        """Start `python *arguments` with further environment variables; what it prints goes to
        `log`, and when it ends what it used (`cpu_seconds`, `peak_memory_bytes`) to `usage`, as
        JSON."""
        file = log.open("ab")
        guard = Path(__file__).with_name("guard.py")
        process = subprocess.Popen(
            [sys.executable, str(guard), str(usage), *arguments],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **settings},
        )
        return LocalJob(process, file)
