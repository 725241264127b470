"""A real Ray cluster of two nodes on this machine, as Ray's own tests start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

# In a process of its own: what Ray starts in a process, it cannot always end there.
_CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster

room = {"num_cpus": 1, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
nodes = {"n2": cluster.add_node(**room, num_gpus=2)}
cluster.wait_for_nodes()
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    what, _, name = line.strip().partition(" ")
    if name == "head":
        cluster.head_node.kill_gcs_server()
    elif what == "kill":
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    else:
        nodes[name] = cluster.add_node(**room, num_gpus=2)
        cluster.wait_for_nodes()
    print(json.dumps(name), flush=True)
cluster.shutdown()
"""


class RayCluster:
    """A head and a node of one CPU each; the second node has two GPUs, as Ray counts them."""

    def __init__(self, **settings: str) -> None:
        """Args: `settings`: environment variables of it."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_CLUSTER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **settings},
        )
        self.address = self._answer()

    def ask(self, what: str) -> None:
        """`kill head`, `kill NODE` or `add NODE`."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return str(json.loads(self._process.stdout.readline()))

    def stop(self) -> None:
        self._process.communicate(timeout=60)


def at(cluster: RayCluster) -> list[str]:
    return ["--executor", "ray", "--set", f"executor.address={cluster.address}"]
