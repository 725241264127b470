"""vLLM's engine inside the program that uses it, where that is possible.

By default an engine is two processes beside the program, and each imports torch and vLLM anew:
seven seconds of a core each time. On a GPU that is nothing beside what two processes gain; a CPU
has nothing to gain by them. Only with one rank. Imports no engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"


def settings(cores: Sequence[int]) -> dict[str, str]:
    """What a program's environment says for it, and what vLLM would say to its worker's OpenMP."""
    listed = ",".join(map(str, cores))
    return {
        _APART: "0",
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",  # milliseconds
        "KMP_TPAUSE": "0",
    }


def inside() -> bool:
    """Whether this program's engine runs inside it: only while it is stepped."""
    return os.environ.get(_APART) == "0"


def make_ready() -> None:
    """Call before an engine starts inside.

    vLLM 0.32 looks for kernels in `vars()` of whatever the modules of its process hold. llvmlite's
    handle of its library has an answer to every name, `__dict__` too, and that is no dictionary. A
    process of the engine's own has not imported it by then; a program has, with some verifiers.
    """
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    handle: Any = type(ffi.lib)
    answer = handle.__getattr__

    def attribute(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    handle.__getattr__ = attribute
