"""What an executor is: it starts a task, says how that goes, ends it, and finds it again. Pure.

A task is a command line of Python and a folder. Everything it is told and everything it says lies
in files; where an executor runs tasks on other machines, that folder is on a file system they
share with the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Handle = Mapping[str, Any]
"""What a task is found by again, as JSON."""


class ExecutorError(OSError):
    """An executor cannot be used, or refuses a task; the message says why and what to do."""


class TaskLost(Exception):
    """A task is gone without having come to its end: its node died, or it was preempted. The work
    can be given to another; the message says what is known."""


@dataclass(frozen=True)
class Needs:
    """What a task needs. None and 0 ask for nothing in particular."""

    cpus: int | None = None
    gpus: int = 0
    memory_bytes: int | None = None
    nodes: int = 1
    seconds: int | None = None

    @property
    def stated(self) -> bool:
        """Whether anything is asked for."""
        return self != Needs()


@dataclass(frozen=True)
class Node:
    """What one machine has."""

    name: str
    cpus: int
    gpus: int
    memory_bytes: int

    def holds(self, needs: Needs) -> int:
        """How many tasks with these needs it has room for at once."""
        asked = (
            (needs.cpus or 1, self.cpus),
            (needs.gpus, self.gpus),
            (needs.memory_bytes or 0, self.memory_bytes),
        )
        return min(has // wants for wants, has in asked if wants)


@dataclass(frozen=True)
class Offer:
    """What there is, be it free now or not."""

    nodes: tuple[Node, ...]
    seconds: int | None = None
    """The longest that a task may take."""

    def lacks(self, needs: Needs) -> str | None:
        """Why a task can never run here; None when it can."""
        if not self.nodes:
            return "there is no node"
        fitting = [node for node in self.nodes if _fits(node, needs)]
        if len(fitting) < needs.nodes:
            largest = max(self.nodes, key=lambda node: (node.gpus, node.cpus, node.memory_bytes))
            count = f"{needs.nodes} nodes of " if needs.nodes > 1 else ""
            return (
                f"needs {count}{_said(needs)}; {len(fitting)} of {len(self.nodes)} nodes "
                f"{'has' if len(fitting) == 1 else 'have'} that, the largest, {largest.name}, has "
                f"{_size(largest.cpus, largest.gpus, largest.memory_bytes)}"
            )
        if needs.seconds is not None and self.seconds is not None and needs.seconds > self.seconds:
            return f"needs {needs.seconds} s; the longest that is allowed is {self.seconds} s"
        return None


def _fits(node: Node, needs: Needs) -> bool:
    return (
        node.cpus >= (needs.cpus or 0)
        and node.gpus >= needs.gpus
        and node.memory_bytes >= (needs.memory_bytes or 0)
    )


def _said(needs: Needs) -> str:
    return _size(needs.cpus or 0, needs.gpus, needs.memory_bytes or 0)


def _size(cpus: int, gpus: int, memory: int) -> str:
    parts = [f"{gpus} GPU{'s' * (gpus != 1)}", f"{cpus} CPU{'s' * (cpus != 1)}"]
    return ", ".join([*parts, f"{memory / 2**30:.1f} GiB"] if memory else parts)


@dataclass(frozen=True)
class Task:
    """What is to be run."""

    name: str
    """Unique among all tasks there ever are: a task is found by it where nothing else is known."""
    arguments: tuple[str, ...]
    """Of Python."""
    folder: Path
    """It is the task's own: when it is gone, so is the reason to go on."""
    log: Path
    """What it prints is appended here."""
    usage: Path
    """What it used is written here when it ends: `cpu_seconds`, `peak_memory_bytes`, as JSON."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    needs: Needs = Needs()


class Running(Protocol):
    """A task that was submitted."""

    def poll(self) -> int | None:
        """Its exit code, or None while it waits or runs. Raises: TaskLost."""

    def waiting(self) -> str | None:
        """What it waits for before it can begin; None once it runs."""

    def cancel(self) -> None:
        """End it, and everything that it started; nothing to do when it has ended."""

    @property
    def handle(self) -> Handle:
        """What it is found by again."""


class Executor(Protocol):
    """Where tasks run. What a task prints is in its log."""

    name: str
    remote: bool
    """Whether tasks run elsewhere, and go on when the coordinator dies."""

    def offer(self) -> Offer:
        """Raises: ExecutorError."""

    def room(self, needs: Needs, beside: list[Needs]) -> bool:
        """Whether a task should be submitted while others of this coordinator are under way."""

    def submit(self, task: Task) -> Running:
        """Raises: ExecutorError."""

    def find(self, task: Task, handle: Handle) -> Running:
        """A task that another coordinator submitted. An empty handle stands for one that may not
        have been. Raises: ExecutorError."""

    def close(self) -> None:
        """Let go of what it holds; tasks go on."""
