"""The machine: processor, memory, and what torch sees of its GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_eagle.doctor.checks import ABSENT, BROKEN, OK, WARN, Check
from kimi_eagle.terminal import human_size

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TORCH_SECONDS = 300
# What torch says of itself, in a process of its own: it takes seconds and hundreds of MB to load.
_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
devices = range(torch.cuda.device_count()) if cuda else ()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [[torch.cuda.get_device_name(d), torch.cuda.get_device_properties(d).total_memory]
             for d in devices],
}))
"""
_LITTLE_MEMORY = 4e9
# NCCL and vLLM pass tensors between processes through it; containers give 64 MB unless told.
_LITTLE_SHARED = 1e9


def processor(cpuinfo: str | None = None) -> Check:
    """Cores and vector units; `cpuinfo` is text as in /proc/cpuinfo."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
    lines = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
    }
    flags = set(lines.get("flags", "").split())
    shown = [
        name
        for name, flag in (
            ("AVX2", "avx2"),
            ("AVX-512", "avx512f"),
            ("AVX-512 BF16", "avx512_bf16"),
            ("AMX BF16", "amx_bf16"),
        )
        if flag in flags
    ]
    cores = len(os.sched_getaffinity(0))
    text = f"{lines.get('model name', 'unknown')}, {cores} cores"
    text += f", {', '.join(shown)}" if shown else ""
    if flags and not flags & {"avx2", "avx512f"}:
        return Check("processor", WARN, text, "without AVX2 vLLM's CPU build does not start")
    return Check("processor", OK, text)


def memory(meminfo: str | None = None, limit: int | None = None) -> Check:
    """What is available, and the limit of the container if there is one, in bytes."""
    if meminfo is None:
        try:
            meminfo = Path("/proc/meminfo").read_text("utf-8")
        except OSError:
            return Check("memory", WARN, "unknown: /proc/meminfo cannot be read", "")
        limit = _container_limit()
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in meminfo.splitlines()
        if line.endswith("kB")
    }
    available, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    text = f"{human_size(available)} of {human_size(total)} available"
    if limit is not None and limit < total:
        text += f", {human_size(limit)} to this container"
        available = min(available, limit)
    if available < _LITTLE_MEMORY:
        return Check("memory", WARN, text, "the demo takes about 4 GB; end what else runs here")
    return Check("memory", OK, text)


def _container_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text("utf-8"))
        except (OSError, ValueError):  # there is none, or it is `max`
            continue
    return None


def shared_memory(gpus: int, folder: Path = Path("/dev/shm")) -> Check:  # noqa: S108 - only measured
    """What processes of one stage share, where several GPUs make several of them."""
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        return Check("shared memory", WARN, f"there is no {folder}", "start it with --ipc=host")
    text = f"{human_size(size)} in {folder}"
    if size < _LITTLE_SHARED and gpus > 1:
        return Check(
            "shared memory", WARN, text, "start the container with --shm-size=16g or --ipc=host"
        )
    return Check("shared memory", OK, text)


def torch() -> tuple[Check, Mapping[str, Any] | None]:
    """Whether torch loads, and what it says of itself."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"torch did not load within {_TORCH_SECONDS} s"
        return Check("import torch", BROKEN, text, "see what holds the disk or the GPUs up"), None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check("import torch", BROKEN, last, "install torch again as the extra asks"), None
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    built = f"for CUDA {said['cuda']}" if said["cuda"] else "for CPUs"
    return Check("import torch", OK, f"{said['version']}, built {built}"), said


def gpus(said: Mapping[str, Any] | None, extra: str | None, driver: Path = _DRIVER) -> Check:
    """The GPUs that torch sees, against those that the driver knows and the engine that is here.

    Args:
        said: as torch says it; None where torch is not here or does not load.
        extra: whose engine is installed: `cpu`, `gpu` or None.
    """
    known = len(list(driver.glob("*")))
    seen = said["gpus"] if said is not None else []
    if seen:
        text = ", ".join(f"{name} ({human_size(size)})" for name, size in seen)
        if extra == "cpu":
            return Check(
                "gpu",
                WARN,
                text,
                "vLLM is the CPU build and will not use it: install the extra gpu",
            )
        return Check("gpu", OK, text)
    if extra == "gpu" and said is not None:
        why = (
            f"the driver knows {known}, torch sees none"
            if known
            else "there is no NVIDIA driver in this machine or container"
        )
        return Check(
            "gpu",
            BROKEN,
            why,
            "see `nvidia-smi` and CUDA_VISIBLE_DEVICES; a container needs --gpus all; the driver "
            f"must know CUDA {said['cuda']}",
        )
    if known:
        return Check(
            "gpu",
            WARN,
            f"{known} in this machine, and this installation does not use them",
            "install the extra gpu",
        )
    return Check("gpu", ABSENT, "none; stages run on the CPU where the engine is its build")
