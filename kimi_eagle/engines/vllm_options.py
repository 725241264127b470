"""What vLLM is started with, and starting it, alike for extraction and for serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_eagle.engines import in_program
from kimi_eagle.job import StageFailed


def start_engine(options: Mapping[str, Any]) -> Any:
    """A `vllm.LLM`."""
    if in_program.inside():
        in_program.make_ready()
    from vllm import LLM

    return LLM(**options)


def common_options(job: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for a verifier.

    `job` holds `model`, `max_model_len`, `multimodal` and the engine of the manifest (`engine`);
    `sharing`, if it is there, is how many engines are started on the same GPU at the same time.
    """
    engine = job["engine"]
    options: dict[str, Any] = {
        "model": job["model"],
        "dtype": "bfloat16",
        "max_model_len": job["max_model_len"],
        "max_num_batched_tokens": max(engine["max_batched_tokens"], job["max_model_len"]),
        "tensor_parallel_size": engine["tensor_parallel"],
        "enforce_eager": engine["enforce_eager"],
        "seed": 0,
        # A cached prefix is not run again, so its states would be missing, and its arithmetic
        # would differ from that of a run without the cache.
        "enable_prefix_caching": False,
    }
    if job["cpu"]:
        options["kv_cache_memory_bytes"] = int(engine["cpu_kv_cache_gib"] * 2**30)
    else:
        sharing = job.get("sharing", 1)
        options["gpu_memory_utilization"] = engine["gpu_memory_utilization"] / sharing
        if sharing > 1:
            options["kv_cache_memory_bytes"] = _kv_cache_bytes(job, sharing)
    if job["multimodal"]:
        # Text only: without this vLLM reserves encoder memory for a full-size image.
        options["limit_mm_per_prompt"] = {"vision_chunk": 0}
    return options


def attention_options(job: Mapping[str, Any]) -> dict[str, Any]:
    """Further keyword arguments of both engines of an evaluation, with the draft and without.

    On a GPU vLLM 0.26 plans FlashAttention 3's work by the verifier's query heads and hands the
    plan to the draft's attention too, which refuses it where it has another number of them:
    "scheduler_metadata must have shape (metadata_size)". Triton's plans nothing ahead. With MLA the
    two have kernels of their own.

    Args (of `job`): `heads`, `draft_heads`: query heads of the verifier and of the draft.
    """
    if job["cpu"] or job["mla"] or job["heads"] == job["draft_heads"]:
        return {}
    return {"attention_backend": "TRITON_ATTN"}


def draft_options(job: Mapping[str, Any], *, machine: str, amx: bool) -> dict[str, Any]:
    """Further keyword arguments where a draft is served.

    Args (besides those of `job`, which holds `draft`, `draft_tokens` and `mla`, whether the
        verifier has it): machine: this processor's kind, as `platform.machine()` says it; amx:
        whether it has AMX.
    """
    options: dict[str, Any] = {
        "speculative_config": {
            "method": "eagle3",
            "model": job["draft"],
            "num_speculative_tokens": job["draft_tokens"],
        }
    }
    if job["cpu"] and job["mla"] and machine == "x86_64" and not amx:
        options["worker_extension_cls"] = "kimi_eagle.engines.draft_attention.InBlocksOf16"
    return options


def _kv_cache_bytes(job: Mapping[str, Any], sharing: int) -> int:
    """Half of what an engine's part of the GPU has left beside the weights.

    vLLM would measure it, and take what the others allocate meanwhile for its own.
    """
    from vllm.platforms import current_platform

    engine = job["engine"]
    part = current_platform.get_device_total_memory() * engine["gpu_memory_utilization"] / sharing
    weights = sum(path.stat().st_size for path in Path(job["model"]).glob("*.safetensors"))
    left = part - weights / engine["tensor_parallel"]
    if left <= 0:
        raise StageFailed(
            f"{sharing} engines on one GPU have {part / 2**30:.1f} GiB each, and the weights alone "
            f"take {weights / engine['tensor_parallel'] / 2**30:.1f}: lower engines_per_gpu"
        )
    return int(left / 2)
