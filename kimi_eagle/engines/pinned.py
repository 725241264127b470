"""Shared memory as a tensor that a GPU copies to. Imports torch."""

from __future__ import annotations

from typing import Any

import torch


def tensor_over(memory: Any, *, pinned: bool) -> Any:
    """uint8 [bytes] over a writable buffer; `pinned`, a GPU copies to it without waiting.

    Raises: RuntimeError: it cannot be pinned.
    """
    found = torch.frombuffer(memory, dtype=torch.uint8)
    if pinned:
        # Pages that are there already are pinned in a third of the time, this included.
        found.zero_()
        code = torch.cuda.cudart().cudaHostRegister(found.data_ptr(), found.numel(), 0)
        if int(code) != 0:
            raise RuntimeError(f"the ring cannot be pinned: cudaHostRegister gave {code}")
    return found
