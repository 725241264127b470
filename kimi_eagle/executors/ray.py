"""Run tasks in a Ray cluster that is there already. Ray is spoken to by `ray_bridge`."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

from kimi_eagle.executors import shared
from kimi_eagle.executors.protocol import (
    ExecutorError,
    Handle,
    Needs,
    Node,
    Offer,
    Task,
    TaskLost,
)

_ASK_SECONDS = 1.0
_ANSWER_SECONDS = 120.0
_CONNECT_AGAIN_SECONDS = 5.0
# A task says how it ended on a shared file system, which may show that late.
_LATE_LOOKS = 3


class _Away(Exception):
    """The cluster does not answer."""


class RayTask:
    """A detached actor and what it started: a subprocess, or on each of several nodes one."""

    def __init__(self, task: Task, cluster: RayExecutor):
        self._task = task
        self._cluster = cluster
        self._clock = shared.Clock(_ASK_SECONDS)
        self._late = 0
        self._away_since: float | None = None

    @property
    def handle(self) -> Handle:
        return {"actor": self._task.name}

    def waiting(self) -> str | None:
        begun = shared.silence(self._task) is not None
        return None if begun else "waiting for room in the Ray cluster"

    def poll(self) -> int | None:
        code = shared.exit_code(self._task)
        if code is not None:
            return code
        if not self._clock.due():
            return None
        try:
            there = self._cluster.ask("find", name=self._task.name)["there"]
        except _Away as away:
            self._unheard(str(away))
            return None
        self._away_since = None
        if there:
            self._late = 0
            return None
        if self._late < _LATE_LOOKS:
            self._late += 1
            return None
        raise TaskLost("its node, or its process there, is gone from the Ray cluster")

    def _unheard(self, why: str) -> None:
        """A head that is gone need not have taken the task's node with it. Raises: TaskLost."""
        self._away_since = self._away_since or time.monotonic()
        silence = shared.silence(self._task)
        quiet = time.monotonic() - self._away_since if silence is None else silence
        if quiet > shared.SILENCE_SECONDS:
            raise TaskLost(f"{why}, and the task has given no sign of life for {quiet:.0f} s")

    def cancel(self) -> None:
        if not shared.over(self._task):
            with contextlib.suppress(_Away):
                self._cluster.ask("cancel", name=self._task.name)


class RayExecutor:
    """Starts each task as a detached actor of a cluster."""

    name = "ray"
    remote = True

    def __init__(self, address: str, python: str | None = None):
        """Args: `python`: the interpreter on the nodes, where it is another than here."""
        self._address = address
        self._python = python
        self._bridge: subprocess.Popen[str] | None = None
        self._not_before = 0.0

    def offer(self) -> Offer:
        try:
            nodes = self.ask("offer")["nodes"]
        except _Away as away:
            raise ExecutorError(str(away)) from None
        return Offer(tuple(Node(**node) for node in nodes))

    def room(self, needs: Needs, beside: list[Needs]) -> bool:
        """The queue is Ray's."""
        return True

    def submit(self, task: Task) -> RayTask:
        try:
            self.ask(
                "submit",
                name=task.name,
                command=shared.command(task, self._python),
                environment=shared.environment(task),
                log=str(task.log),
                cpus=task.needs.cpus or 1,
                gpus=task.needs.gpus,
                memory=task.needs.memory_bytes,
                nodes=task.needs.nodes,
            )
        except _Away as away:
            raise ExecutorError(str(away)) from None
        return RayTask(task, self)

    def find(self, task: Task, handle: Handle) -> RayTask:
        return RayTask(task, self)

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.communicate()
            self._bridge = None

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """Ask the bridge, which is started when there is none. Raises: _Away."""
        bridge = self._connected()
        assert bridge.stdin is not None
        try:
            bridge.stdin.write(json.dumps({"do": what, **values}) + "\n")
            bridge.stdin.flush()
        except OSError:
            self.close()
            raise _Away(f"the Ray cluster at {self._address} is gone") from None
        answer = self._answer(bridge)
        if "error" in answer:
            raise _Away(f"Ray at {self._address}: {answer['error']}")
        return answer

    def _connected(self) -> subprocess.Popen[str]:
        if self._bridge is not None and self._bridge.poll() is None:
            return self._bridge
        self.close()
        if find_spec("ray") is None:
            raise ExecutorError("ray is not installed here: pip install 'kimi-eagle[ray]'")
        if time.monotonic() < self._not_before:
            raise _Away(f"the Ray cluster at {self._address} does not answer")
        self._not_before = time.monotonic() + _CONNECT_AGAIN_SECONDS
        self._bridge = subprocess.Popen(
            [sys.executable, "-m", "kimi_eagle.executors.ray_bridge", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # An interrupt is the coordinator's: it needs the bridge to end what runs.
            start_new_session=True,
        )
        answer = self._answer(self._bridge)
        if "error" in answer:
            self.close()
            raise _Away(str(answer["error"]))
        return self._bridge

    def _answer(self, bridge: subprocess.Popen[str]) -> dict[str, Any]:
        assert bridge.stdout is not None
        ready, _, _ = select.select([bridge.stdout], [], [], _ANSWER_SECONDS)
        line = bridge.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise _Away(f"the Ray cluster at {self._address} does not answer")
        return dict(json.loads(line))
