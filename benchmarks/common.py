"""What the benchmarks share: a child process measured whole, and figures as JSON lines.

A figure is one line on standard output, `{"name", "value", "unit", "baseline", "ratio"}`: `ratio`
is value over baseline, null where there is none. With `--record` it is appended to
`benchmarks/results.jsonl` too, with the command, the machine, the versions and the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
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


def measure(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Usage:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    started = os.times().elapsed
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {process.returncode}:\n{output.decode()[-4000:]}"
        )
    return Usage(used.ru_utime + used.ru_stime, os.times().elapsed - started, used.ru_maxrss * 1024)


class Figures:
    """Prints figures, and keeps them where that is asked for."""

    def __init__(self, options: argparse.Namespace):
        self._record: bool = options.record

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
            "value": _rounded(value),
            "unit": unit,
            "baseline": _rounded(baseline),
            "ratio": _rounded(ratio),
            **more,
        }
        print(json.dumps(figure), flush=True)
        if self._record:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**figure, **_circumstances()}) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _circumstances() -> dict[str, Any]:
    known = environment()
    packages = ("blake3", "pydantic", "pyyaml", "sqlalchemy")
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "command": f"python benchmarks/{' '.join(command)}",
        "processor": known["processor"],
        "cores": known["cores"],
        "system": platform.system(),
        "python": known["python"],
        "versions": {
            "kimi-eagle": known["kimi_eagle"],
            **{name: metadata.version(name) for name in packages},
        },
        "code": known["code"],
        "at": now(),
    }
