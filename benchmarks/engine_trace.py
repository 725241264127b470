"""Where an engine's process spent its time, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

STEP = "gpu_model_runner: forward"
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def per_step(folder: Path) -> dict[str, float]:
    """Milliseconds a step of the only trace in a folder: `step` from the beginning of one to that
    of the next, the median; `gpu`, in which the GPU was at work; and each range that vLLM names, on
    the CPU.

    Raises:
        ValueError: there is no trace, or more than one, or it has fewer than two steps.
    """
    (path,) = folder.glob("*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X"]
    began = sorted(event["ts"] for event in timed if event["name"] == STEP and _on_cpu(event))
    if len(began) < 2:
        raise ValueError(f"{path} has {len(began)} steps")
    apart = sorted(after - before for before, after in pairwise(began))
    ranges: dict[str, float] = defaultdict(float)
    for event in timed:
        if _on_cpu(event) and ": " in event["name"]:  # not one for each make-up of a batch
            ranges[event["name"]] += event["dur"]
    gpu = _covered((e["ts"], e["ts"] + e["dur"]) for e in timed if e.get("cat") in _GPU)
    found = {"step": apart[len(apart) // 2], "gpu": gpu / len(began)}
    found |= {name: took / len(began) for name, took in sorted(ranges.items())}
    return {name: round(took / 1000, 3) for name, took in found.items()}


def _on_cpu(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of time any of the spans covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
