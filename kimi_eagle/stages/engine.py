"""The engines that a stage can run the verifier on, as a manifest writes them. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kimi_eagle.stages.contract import OUTSIDE_KEY, Model


class VllmEngine(Model):
    """vLLM in a process of its own; on a machine without a GPU its CPU build."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 1
    """GPUs that share one copy of the verifier; of the CPU build, shares of the cores."""
    max_batched_tokens: Annotated[int, Field(ge=16), OUTSIDE_KEY] = 8192
    """Tokens in one forward pass of the engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), OUTSIDE_KEY] = 0.9
    cpu_kv_cache_gib: Annotated[float, Field(gt=0), OUTSIDE_KEY] = 1.0
    """KV cache of the CPU build, in GiB."""
    buffer_mib: Annotated[Annotated[int, Field(ge=16)] | None, OUTSIDE_KEY] = None
    """Memory between the engine and the writers of hidden states, in MiB; it must hold the longest
    row. When it is full the engine waits for the disk. By default 1024, or what six forward passes
    or two of the longest rows take where that is more."""
    enforce_eager: Annotated[bool, OUTSIDE_KEY] = True
    """Start without compiling: faster to start, slower to run."""


class ExtractEngine(VllmEngine):
    """vLLM, started for the stage or served already."""

    endpoint: Annotated[
        Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None, OUTSIDE_KEY
    ] = None
    """Address of a vLLM server of this verifier that runs our connector, instead of starting one:
    `http://host:8000`. `docs/extraction.md` has the command it is started with."""
    spool: Annotated[Annotated[str, Field(min_length=1)] | None, OUTSIDE_KEY] = None
    """The folder that server writes states to, as this machine sees it."""
    concurrency: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 64
    """Requests that the server is given at once."""

    @model_validator(mode="after")
    def _whole(self) -> ExtractEngine:
        if (self.endpoint is None) != (self.spool is None):
            raise ValueError("`endpoint` and `spool` are given together, or neither is")
        return self


class TransformersEngine(Model):
    """transformers, one row at a time: the reference that vLLM is checked against."""

    kind: Literal["transformers"] = "transformers"


Engine = Annotated[ExtractEngine | TransformersEngine, Field(discriminator="kind")]
