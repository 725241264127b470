"""What the programs that extract hidden states are told. Imports numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.engines.cache_blocks import block_tokens
from kimi_eagle.engines.launch import has_gpu
from kimi_eagle.engines.ring import ALIGNMENT, aligned
from kimi_eagle.engines.todo import Todo
from kimi_eagle.stages.engine import Engine, ExtractEngine
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.verifiers.folder import VerifierFolder

WORKER, CONNECTOR = "worker", "connector"
"""Who hands states over in vLLM: its worker, as they come out of a forward pass (`capture`), or a
connector, out of a cache when a request has ended (`connector`), as in a server."""

_LEAST_RING = 1 << 30
_PASSES = 6


def extraction_job(
    verifier: VerifierFolder,
    contract: LayerContract,
    params: Any,
    rows: Path,
    shards: Path,
    events: Path,
) -> dict[str, Any]:
    """The job of an engine's program.

    Args:
        params: of an `extract` stage.
        rows: what has to be done, as `Todo.write` writes it.
        shards: where shards are written; each is announced in `events`.
    """
    todo = Todo(str(rows))
    longest = max(todo.tokens(row) for row in range(len(todo)))
    return {
        "model": str(verifier.path),
        "rows": str(rows),
        "contract": contract.document(),
        "shards": str(shards),
        "shard_bytes": params.shard_bytes,
        "events": str(events),
        # One more than the longest row: the engine also wants room for the token it generates.
        "max_model_len": longest + 2,
        "multimodal": verifier.facts.model_type == "kimi_k25",
        "cpu": not has_gpu(),
        **_of_vllm(verifier, contract, params.engine, longest),
        "engine": params.engine.model_dump(mode="json"),
        "head": {
            plain: [str(path), name] for plain, (path, name) in verifier.head_tensors().items()
        },
        "rms_norm_eps": verifier.facts.rms_norm_eps,
        "min_agreement": params.min_agreement,
        "max_bad_rows": params.max_bad_rows,
    }


def _of_vllm(
    verifier: VerifierFolder, contract: LayerContract, engine: Engine, longest: int
) -> dict[str, Any]:
    if engine.kind != "vllm":
        return {}
    token_bytes = contract.engine_bytes_per_token
    return {
        # The worker has not been measured on a GPU beside the connector yet.
        "by": CONNECTOR if has_gpu() else WORKER,
        # What a CPU backend can do with blocks is its own to know.
        "block_tokens": block_tokens(verifier.facts, token_bytes, engine.tensor_parallel)
        if has_gpu()
        else None,
        "ring_bytes": _ring_bytes(engine, token_bytes, longest),
    }


def _ring_bytes(engine: ExtractEngine, token_bytes: int, longest: int) -> int:
    """Memory between an engine and its writers.

    A pass takes its share as soon as it is launched, one ahead of the one that runs, and gives it
    back when its rows are written: with room for three the engine waits for every hitch of a disk.
    """
    if engine.buffer_mib is not None:
        return engine.buffer_mib << 20
    tokens = max(_PASSES * engine.max_batched_tokens, 2 * longest)
    return max(_LEAST_RING, aligned((token_bytes + 4) * tokens) + 4 * ALIGNMENT)
