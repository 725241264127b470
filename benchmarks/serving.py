"""A server of our own on loopback, for a benchmark to ask."""

from __future__ import annotations

import socket
import urllib.request


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    """Whether vLLM's server there is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
