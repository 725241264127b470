"""Speaks to a Ray cluster for a coordinator: `python -m kimi_eagle.executors.ray_bridge ADDRESS`.

A process of its own, since Ray ends the process that speaks to a cluster whose head is gone, and a
coordinator has to outlive that. One JSON object a line, asked on standard input and answered on
standard output:

    {"do": "offer"}                                   → {"nodes": [{"name", "cpus", "gpus", …}]}
    {"do": "submit", "name", "command", "environment", "log", "cpus", "gpus", "memory"}  → {}
    {"do": "find", "name"}                            → {"there": whether it waits or runs}
    {"do": "cancel", "name"}                          → {}

or `{"error": text}`. A task is a detached actor that starts one subprocess and ends with it; Ray
holds nothing else of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

NAMESPACE = "kimi-eagle"
GRACE_SECONDS = 10.0


class Launcher:
    """The actor: it starts the command when it is made, so that nobody has to be there by then."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: str):
        # Ray counts threads by the CPUs that a task asked for; how many there are is not its say.
        values = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                list(command),
                # Its guard ends everything when this actor is gone, however that went.
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**values, **environment},
            )
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os._exit(0)

    def cancel(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        time.sleep(GRACE_SECONDS)  # it ends with the process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Bridge:
    """Answers what is asked."""

    def offer(self) -> dict[str, Any]:
        nodes = []
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"]:
                has = node["Resources"]
                nodes.append(
                    {
                        "name": node["NodeManagerHostname"],
                        "cpus": int(has.get("CPU", 0)),
                        "gpus": int(has.get("GPU", 0)),
                        "memory_bytes": int(has.get("memory", 0)),
                    }
                )
        return {"nodes": nodes}

    def submit(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: str,
        cpus: int,
        gpus: int,
        memory: int | None,
    ) -> dict[str, Any]:
        actor = ray.remote(Launcher).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy="SPREAD",
            **({"memory": memory} if memory else {}),
        )
        actor.remote(command, environment, log)
        return {}

    def find(self, name: str) -> dict[str, Any]:
        return {"there": self._actor(name) is not None}

    def cancel(self, name: str) -> dict[str, Any]:
        actor = self._actor(name)
        if actor is not None:
            with contextlib.suppress(RayError):
                ray.get(actor.cancel.remote(), timeout=GRACE_SECONDS + 5)
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        return {}

    def _actor(self, name: str) -> Any:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None


def main(address: str) -> int:
    # What Ray prints is not an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        _say(answers, {"error": f"no Ray cluster at {address}: {error}"})
        return 1
    _say(answers, {"ready": ray.__version__})
    bridge = Bridge()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(bridge, asked.pop("do"))(**asked)
        except (RayError, ValueError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, answer)
    return 0


def _say(answers: Any, value: Mapping[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
