"""Run tasks in a Slurm allocation: `sbatch`, `squeue`, `scontrol`, `scancel`, and `sacct` where
there is one. Retries are the coordinator's: a job is submitted with `--no-requeue`, so that no two
attempts ever share a folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from dataclasses import dataclass

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
from kimi_eagle.nodes import NODE

_ASK_SECONDS = 2.0
# What Slurm calls a job that was ended for no fault of its own.
_LOST = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED", "REQUEUED"}
# And one that asked for too little.
_FAULTS = {"TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"}
_QUEUED = {"PENDING", "CONFIGURING", "SUSPENDED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_ALIVE = _QUEUED | {"RUNNING", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING", "STOPPED"}
# Slurm gives what it ends half a minute between asking and killing, if nothing else is set.
_END_SECONDS = 45.0
# A shared file system may show what a job wrote last a while after its scheduler says it ended.
_LATE_LOOKS = 5


@dataclass(frozen=True)
class SlurmSettings:
    """How jobs are submitted."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch."""
    setup: str = ""
    """Lines of shell before the job's own command."""
    python: str | None = None
    """The interpreter on the nodes, where it is another than here."""


class SlurmTask:
    """A batch job."""

    def __init__(self, task: Task, job: str):
        self._task = task
        self._job = job
        self._clock = shared.Clock(_ASK_SECONDS)
        self._queued: str | None = "queued"
        self._late = 0

    @property
    def handle(self) -> Handle:
        return {"job": self._job}

    def waiting(self) -> str | None:
        return f"Slurm job {self._job}: {self._queued}" if self._queued else None

    def poll(self) -> int | None:
        try:
            code = shared.exit_code(self._task)
            killed = None
        except TaskLost as lost:
            code, killed = None, lost
        if code == 0:
            return 0
        if not self._clock.due():
            return None
        state = _state(self._job)
        if state is None:
            return code  # nobody can be asked now
        name, reason, own = state
        if name in _ALIVE:  # why it ended is known when it has ended
            self._queued = f"{name.lower()} ({reason})" if name in _QUEUED else None
            return None
        if name in _LOST:
            raise TaskLost(f"Slurm job {self._job}: {name}")
        if code is not None and name not in _FAULTS:
            return code
        if killed is not None and name not in {*_FAULTS, "CANCELLED"}:
            raise killed
        if code is None and self._late < _LATE_LOOKS:
            self._late += 1
            return None
        if code is None and self._task.needs.nodes > 1 and name in ("FAILED", "COMPLETED"):
            raise TaskLost(f"Slurm job {self._job}: one of its nodes ended without a word")
        if name == "UNKNOWN":
            raise TaskLost(f"Slurm knows nothing of job {self._job} any more")
        with self._task.log.open("a", encoding="utf-8") as log:
            log.write(f"\nSlurm ended job {self._job}: {name} ({reason})\n")
        return own or code or 1

    def cancel(self) -> None:
        if shared.over(self._task):
            return
        _ask("scancel", self._job)
        deadline = time.monotonic() + _END_SECONDS
        while (state := _state(self._job)) and state[0] in _ALIVE and time.monotonic() < deadline:
            time.sleep(0.2)


class SlurmExecutor:
    """Submits each task as a batch job."""

    name = "slurm"
    remote = True

    def __init__(self, settings: SlurmSettings):
        self._settings = settings

    def offer(self) -> Offer:
        partition = self._settings.partition
        shown = _told("scontrol", "show", "partition", "-o", *([partition] if partition else []))
        partitions = [_fields(line) for line in shown.splitlines() if line.strip()]
        if partition is None:
            chosen = [item for item in partitions if item.get("Default") == "YES"] or partitions
        else:
            chosen = partitions
        names = {item.get("PartitionName", "") for item in chosen}
        times = [_seconds(item.get("MaxTime", "UNLIMITED")) for item in chosen]
        known = [time for time in times if time is not None]
        nodes = [
            _node(fields)
            for line in _told("scontrol", "show", "node", "-o").splitlines()
            if (fields := _fields(line)) and names & set(fields.get("Partitions", "").split(","))
        ]
        longest = max(known) if known and len(known) == len(times) else None
        return Offer(tuple(nodes), longest)

    def room(self, needs: Needs, beside: list[Needs]) -> bool:
        """The queue is Slurm's."""
        return True

    def submit(self, task: Task) -> SlurmTask:
        script = task.folder / "job.sh"
        script.write_text(self._script(task), "utf-8")
        said = _told("sbatch", *self._options(task), str(script))
        return SlurmTask(task, said.strip().split(";")[0])

    def find(self, task: Task, handle: Handle) -> SlurmTask:
        job = str(handle.get("job", ""))
        if not job:
            # It died between sending and noting it.
            found = _told("squeue", "--noheader", "--name", task.name, "--format=%i").split()
            job = found[0] if found else "0"
        return SlurmTask(task, job)

    def close(self) -> None:
        """Nothing is held."""

    def _options(self, task: Task) -> list[str]:
        needs, settings = task.needs, self._settings
        options = [
            "--parsable",
            "--no-requeue",
            f"--job-name={task.name}",
            f"--output={task.log}",
            "--open-mode=append",
            f"--chdir={task.folder}",
            f"--nodes={needs.nodes}",
            "--ntasks-per-node=1",
        ]
        for name in ("partition", "account", "qos"):
            value = getattr(settings, name)
            options += [f"--{name}={value}"] if value else []
        options += [f"--cpus-per-task={needs.cpus}"] if needs.cpus else []
        options += [f"--gres=gpu:{needs.gpus}"] if needs.gpus else []
        if needs.memory_bytes:
            options.append(f"--mem={-(-needs.memory_bytes // 2**20)}M")
        if needs.seconds:
            options.append(f"--time={-(-needs.seconds // 60)}")
        return [*options, *settings.options]

    def _script(self, task: Task) -> str:
        lines = ["#!/bin/sh"]
        lines += [self._settings.setup] if self._settings.setup else []
        for name, value in shared.environment(task).items():
            lines.append(f"export {name}={shlex.quote(value)}")
        command = shlex.join(shared.command(task, self._settings.python))
        if task.needs.nodes > 1:
            command = shlex.join(_on_each(task.needs, command))
        return "\n".join([*lines, f"exec {command}", ""])


def _on_each(needs: Needs, command: str) -> list[str]:
    """A command line that runs another on each node of a job, told which one it is on; all are
    ended when one is killed."""
    return [
        "srun",
        f"--nodes={needs.nodes}",
        f"--ntasks={needs.nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={needs.cpus}"] if needs.cpus else []),
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        # Its own standard input is a pipe that has ended, which tells a guard to end too.
        *("sh", "-c", f'export {NODE}="$SLURM_NODEID"; exec {command} </dev/null'),
    ]


def _state(job: str) -> tuple[str, str, int] | None:
    """(state, reason, exit code) of a job; None when Slurm does not answer."""
    done = _ask("scontrol", "show", "job", "-o", job)
    if done.returncode == 0 and "JobState=" in done.stdout:
        fields = _fields(done.stdout)
        code = fields.get("ExitCode", "0:0").split(":")
        return fields["JobState"], fields.get("Reason", ""), int(code[0])
    if "Invalid job id" not in done.stderr:
        return None
    try:
        told = _ask("sacct", "-n", "-X", "-P", "-o", "State,ExitCode", "-j", job)
    except ExecutorError:
        return "UNKNOWN", "", 0
    line = told.stdout.strip().splitlines()
    if told.returncode != 0 or not line:
        return "UNKNOWN", "", 0
    state, _, code_text = line[0].partition("|")
    return state.split()[0], "", int(code_text.split(":")[0] or 0)


def _node(fields: dict[str, str]) -> Node:
    gpus = sum(
        int(found[1])
        for part in re.split(r",(?![^(]*\))", fields.get("Gres", ""))
        if (found := re.match(r"gpu(?::[^:(]+)?:(\d+)", part))
    )
    cpus = int(fields.get("CPUEfctv") or fields.get("CPUTot") or 0)
    return Node(fields["NodeName"], cpus, gpus, int(fields.get("RealMemory", "0")) * 2**20)


def _seconds(text: str) -> int | None:
    """`[days-]hours:minutes:seconds`; None where there is no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def _told(*command: str) -> str:
    """What a command of Slurm prints. Raises: ExecutorError."""
    done = _ask(*command)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}"
        raise ExecutorError(f"{command[0]} refused: {said}")
    return done.stdout


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Raises: ExecutorError: there is no such command here."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError:
        raise ExecutorError(
            f"there is no {command[0]} here: submit from a machine that has Slurm's commands"
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer in 120 s")
