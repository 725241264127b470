"""Attention of a draft beside a verifier with MLA, on a CPU without AMX.

    vllm serve … --worker-extension-cls kimi_eagle.engines.draft_attention.InBlocksOf16

There vLLM 0.32 runs MLA by a kernel for cache blocks of 16 tokens alone, and a draft's attention is
in one cache group with it, so in blocks of that size. Of the latter it says that it takes multiples
of 32, and ends: "No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])."
But its kernel takes multiples of 16 too, by what vLLM calls the instruction set `vec16`. With AMX
it runs MLA by another kernel, whose blocks suit both.

Backends are looked up in vLLM's worker processes, which load a worker extension first of all.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


@register_backend(AttentionBackendEnum.CPU_ATTN)
class CPUAttentionInBlocksOf16(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's own, in smaller blocks too."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


class InBlocksOf16:
    """Adds nothing to a worker: to load it is to load the backend above."""
