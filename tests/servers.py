"""vLLM as a server on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conftest import wait_for

from kimi_eagle.engines.launch import environment


@contextmanager
def vllm(log: Path, *arguments: str) -> Iterator[str]:
    """Run `vllm ARGUMENTS…` on a free port until the context ends; gives its address once it
    answers. What it prints goes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # As the docs say, a server on a CPU must be told: without, it takes nearly all memory.
    env = {**environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as health:
                return bool(health.status == 200)
        except OSError:
            time.sleep(0.5)
            return False

    try:
        wait_for(answers, f"a server (see {log})", 300)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def demo_options(length: int = 512) -> Sequence[str]:
    """What this machine wants besides, with the demo's verifier: short rows, no compilation, no
    room for images."""
    few = ["--max-model-len", str(length), "--enforce-eager"]
    return [*few, "--limit-mm-per-prompt", '{"vision_chunk": 0}']
