"""A real Slurm of two nodes on this machine, from Debian's packages, unpacked and not installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
    "liblua5.1-0",
)
NODES = ("n1", "n2")

_CONFIGURATION = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={base}/run/munge
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={base}/run/state
SlurmdSpoolDir={base}/run/spool-%n
SlurmctldPidFile={base}/run/ctld.pid
SlurmdPidFile={base}/run/d-%n.pid
SlurmctldLogFile={base}/run/log/ctld.log
SlurmdLogFile={base}/run/log/d-%n.log
PluginDir={base}/root/usr/lib/{triplet}/slurm-wlm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=defer_batch,batch_sched_delay=0,sched_interval=1
SlurmctldTimeout=10
SlurmdTimeout=10
ReturnToService=2
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=p Nodes=ALL Default=YES MaxTime=60 State=UP
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=1 \
RealMemory=4000 State=UNKNOWN
"""


class SlurmCluster:
    """A controller and two nodes of one CPU each; `environment` is what its commands need."""

    def __init__(self, base: Path):
        self.base = base
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        libraries = base / "root/usr/lib" / _triplet()
        self._sbin = base / "root/usr/sbin"
        self.environment = {
            "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'slurm-wlm'}",
            "SLURM_CONF": str(base / "slurm.conf"),
            "PATH": f"{base / 'root/usr/bin'}:{os.environ['PATH']}",
        }

    def start(self) -> None:
        for folder in ("run/state", "run/log"):
            (self.base / folder).mkdir(parents=True)
        ports = _free_ports(3)
        text = _CONFIGURATION.format(
            host=socket.gethostname(),
            base=self.base,
            user=pwd.getpwuid(os.getuid()).pw_name,
            triplet=_triplet(),
            port=ports[0],
            first=ports[1],
            second=ports[1] + 1,
        )
        (self.base / "slurm.conf").write_text(text, "utf-8")
        key = self.base / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        run = self.base / "run"
        self._start(
            "munged", "munged", "--foreground", "--force", f"--socket={run}/munge",
            f"--key-file={key}", f"--pid-file={run}/munged.pid", f"--log-file={run}/munged.log",
            f"--seed-file={run}/munged.seed",
        )  # fmt: skip
        _until(lambda: (run / "munge").exists(), "munged")
        self._start("slurmctld", "slurmctld-wlm", "-D")
        for node in NODES:
            self.start_node(node)
        idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        _until(lambda: self.command(*idle).strip() == str(len(NODES)), "nodes")

    def start_node(self, name: str) -> None:
        stepd = str(self._sbin / "slurmstepd-wlm")
        self._start(name, "slurmd-wlm", "-D", "-N", name, "-d", stepd)

    def kill_node(self, name: str) -> None:
        """As if its power went: the daemon and all that it started are gone at once."""
        daemon = self._processes.pop(name)
        for step in [daemon.pid, *_descendants(daemon.pid), *self._steps(name)]:
            _kill(step)
        daemon.wait()

    def _steps(self, node: str) -> list[int]:
        """What the jobs of a node run, and the daemons of their steps, which are no children of
        its own daemon's."""
        found = set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                above = Path(f"/proc/{parent}/comm").read_text().strip()
            except OSError:
                continue
            here = f"SLURM_CONF={self.base / 'slurm.conf'}" in environment
            if here and f"SLURMD_NODENAME={node}" in environment:
                found |= {int(entry.name)} | ({parent} if above.startswith("slurmstepd") else set())
        return sorted(found)

    def command(self, *arguments: str) -> str:
        return subprocess.run(
            arguments,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    def stop(self) -> None:
        for node in NODES:
            if node in self._processes:
                self.kill_node(node)
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.base / "run" / f"{name}.out").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [str(self._sbin / program), *arguments],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def unpacked(folder: Path) -> None:
    """Debian's packages below `folder/root`; skips where they cannot be had."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("Slurm comes from Debian's packages, and this is no Debian")
    packages = folder / "packages"
    packages.mkdir(parents=True)
    done = _run(["apt-get", "download", *PACKAGES], packages)
    if done.returncode != 0:
        _run(["apt-get", "update"], packages)
        done = _run(["apt-get", "download", *PACKAGES], packages)
    if done.returncode != 0:
        pytest.skip(f"Debian's packages of Slurm cannot be had here: {done.stderr[-300:]}")
    for package in packages.glob("*.deb"):
        _run(["dpkg", "-x", package.name, str(folder / "root")], packages).check_returncode()


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _triplet() -> str:
    return f"{os.uname().machine}-linux-gnu"


def _free_ports(count: int) -> list[int]:
    """The first of as many ports in a row that nobody listens on."""
    for first in range(17000, 30000, 10):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + offset))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        return [first + offset for offset in range(count)]
    raise OSError("no free ports")


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in children for found in [int(child), *_descendants(int(child))]]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come up in {seconds} s"
        time.sleep(0.1)
