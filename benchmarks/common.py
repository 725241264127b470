"""What the benchmarks share: a child process measured whole, and figures as JSON lines.

A figure is one line on standard output, `{"name", "value", "unit", "baseline", "ratio"}`: `ratio`
is value over baseline, null where there is none. With `--record` it is appended to
`benchmarks/results.jsonl` too, with the command, the machine, the versions and the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kimi_eagle.clock import now
from kimi_eagle.provenance import environment

RESULTS = Path(__file__).with_name("results.jsonl")
KIMI_EAGLE = [sys.executable, "-m", "kimi_eagle"]


@dataclass(frozen=True)
class Usage:
    """What a process and the children it waited for took."""

    cpu_seconds: float
    seconds: float
    peak_bytes: int
    """Resident memory of the largest of them."""


# A process begins with the peak memory of the one that started it, so a small one must.
_LAUNCHER = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=2)
_, status, used = os.wait4(process.pid, 0)
figures = [used.ru_utime + used.ru_stime, time.perf_counter() - started, used.ru_maxrss * 1024]
with open(sys.argv[1], "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), *figures], file)
"""


def measure(command: Sequence[str], *, cwd: Path | None = None) -> Usage:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    # Whoever installs a program has its bytecode.
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.NamedTemporaryFile("r") as told:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _LAUNCHER, told.name, *command],
            cwd=cwd,
            env=environment,
            stderr=subprocess.PIPE,
            check=True,
        )
        code, *figures = json.load(told)
    if code != 0:
        output = done.stderr.decode(errors="replace")[-4000:]
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{output}")
    return Usage(*figures)


class Figures:
    """Prints figures, and keeps them where that is asked for."""

    def __init__(self, options: argparse.Namespace):
        self._record: bool = options.record
        self.made: Mapping[str, Any] | None = None
        """The circumstances and the time of what is measured; None: this process, now."""

    def emit(
        self,
        name: str,
        value: float | None,
        unit: str,
        baseline: float | None = None,
        **more: Any,
    ) -> None:
        ratio = value / baseline if value is not None and baseline else None
        figure = {
            "name": name,
            # Bytes are counted, not measured.
            "value": value if unit == "bytes" else _rounded(value),
            "unit": unit,
            "baseline": _rounded(baseline),
            "ratio": _rounded(ratio),
            **more,
        }
        print(json.dumps(figure), flush=True)
        if self._record:
            with RESULTS.open("a", encoding="utf-8") as file:
                command = f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
                made = self.made if self.made is not None else _here()
                file.write(json.dumps({**figure, "command": command, **made}) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def circumstances(known: Mapping[str, Any]) -> dict[str, Any]:
    """Machine, versions and code of an environment as `provenance` records it."""
    packages = known["packages"]
    here = environment()
    same = all(known[name] == here[name] for name in ("processor", "cores", "packages"))
    return {
        "processor": known["processor"],
        "cores": known["cores"],
        # Where the driver does not show its files, as in some containers, its own tool is asked.
        "gpus": known["gpus"] or (_gpus_here() if same else []),
        "system": known["system"].split("-")[0],
        "python": known["python"],
        "versions": {
            "kimi-eagle": known["kimi_eagle"],
            **{name: packages[name] for name in _TOLD if name in packages},
        },
        "code": known["code"],
    }


_TOLD = ("blake3", "pydantic", "pyyaml", "sqlalchemy", "torch", "vllm", "speculators")


def _gpus_here() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return sorted(done.stdout.split("\n")[:-1]) if done.returncode == 0 else []


def _here() -> dict[str, Any]:
    """The circumstances of this process."""
    found = circumstances(environment())
    installed = {item.metadata["Name"].lower() for item in metadata.distributions()}
    told = {name: metadata.version(name) for name in _TOLD if name in installed}
    return {**found, "versions": {**found["versions"], **told}, "at": now()}
