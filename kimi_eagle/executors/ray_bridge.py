"""Speaks to a Ray cluster for a coordinator: `python -m kimi_eagle.executors.ray_bridge ADDRESS`.

A process of its own, since Ray ends the process that speaks to a cluster whose head is gone, and a
coordinator has to outlive that. One JSON object a line, asked on standard input and answered on
standard output:

    {"do": "offer"}                                   → {"nodes": [{"name", "cpus", "gpus", …}]}
    {"do": "submit", "name", "command", "environment", "log", "cpus", "gpus", …, "nodes"}  → {}
    {"do": "find", "name"}                            → {"there": whether it waits or runs}
    {"do": "cancel", "name"}                          → {}

or `{"error": text}`. A task is a detached actor that starts one subprocess and ends with it; Ray
holds nothing else of it. With several nodes it is one that has such an actor on each, which end
with it, as their places do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kimi_eagle.nodes import ADDRESS, NODE

NAMESPACE = "kimi-eagle"
GRACE_SECONDS = 10.0
CONNECT_SECONDS = 10.0


class Launcher:
    """An actor: it starts the command when it is made, so that nobody has to be there by then."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: str,
        node: int | None = None,
    ):
        """Args: `node`: its number, where there are several: then another ends it."""
        if node is not None:
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            environment = {**environment, NODE: str(node), ADDRESS: address}
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
        if node is None:
            threading.Thread(target=self._end_with_it, daemon=True).start()

    def wait(self) -> int:
        """Until the process has ended, and everything that it started in its group; its code."""
        code = self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def _end_with_it(self) -> None:
        self.wait()
        os._exit(0)

    def cancel(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Conductor:
    """An actor that has a launcher on each of several nodes, and ends with the last that is done or
    the first that is gone, or whose process is. Whatever ends it, its launchers and their places go
    with it."""

    def __init__(
        self,
        launching: Sequence[Any],
        place: Mapping[str, float],
        nodes: int,
    ):
        """Args: `launching`: what a launcher is given; `place`: what each needs of its node."""
        self._launchers: list[Any] = []
        threading.Thread(target=self._conduct, args=(launching, place, nodes), daemon=True).start()

    def _conduct(self, launching: Sequence[Any], place: Mapping[str, float], nodes: int) -> None:
        with contextlib.suppress(RayError):
            group = placement_group([dict(place)] * nodes, strategy="STRICT_SPREAD")
            named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
            self._launchers = [
                ray.remote(Launcher)
                .options(
                    **{named[what]: count for what, count in place.items()},
                    max_restarts=0,
                    max_concurrency=2,  # it waits for its process, and can be cancelled meanwhile
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=node
                    ),
                )
                .remote(*launching, node)
                for node in range(nodes)
            ]
            waiting = [launcher.wait.remote() for launcher in self._launchers]
            while waiting:
                (done, *_), waiting = ray.wait(waiting)
                if ray.get(done) != 0:  # it raises when its node is gone
                    break
        os._exit(0)

    def cancel(self) -> None:
        for asked in [launcher.cancel.remote() for launcher in self._launchers]:
            with contextlib.suppress(RayError):
                ray.get(asked)


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
        nodes: int,
    ) -> dict[str, Any]:
        detached = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if nodes > 1:
            asked = {"CPU": cpus, "GPU": gpus, "memory": memory}
            place = {what: count for what, count in asked.items() if count}
            conductor = ray.remote(Conductor).options(**detached, num_cpus=0, max_concurrency=2)
            conductor.remote((command, environment, log), place, nodes)
            return {}
        actor = ray.remote(Launcher).options(
            **detached,
            num_cpus=cpus,
            num_gpus=gpus,
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
        _heard(address)
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
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


def _heard(address: str) -> None:
    """Raises: OSError: nobody listens there, which Ray takes a quarter of a minute to find."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _say(answers: Any, value: Mapping[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
