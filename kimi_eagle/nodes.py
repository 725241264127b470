"""What a process is told of the nodes that its stage runs on at once, in its environment.

An executor sets these on each node where a stage has several; `executors.guard`, which imports
nothing of ours, says the first two again.
"""

from __future__ import annotations

import os

NODE = "KIMI_EAGLE_NODE"
"""Which one this is, from 0."""
NODES = "KIMI_EAGLE_NODES"
"""How many there are."""
ADDRESS = "KIMI_EAGLE_ADDRESS"
"""What the others reach this one by; its host name, where nothing is said."""


def here() -> int:
    """The number of this node; 0 where there is one alone."""
    return int(os.environ.get(NODE, "0"))
