"""What the programs that extract hidden states are told. Imports numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.engines.cache_blocks import block_tokens
from kimi_eagle.engines.launch import has_gpu
from kimi_eagle.engines.todo import Todo
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.verifiers.folder import VerifierFolder

WORKER, CONNECTOR = "worker", "connector"
"""Who hands states over in vLLM: its worker, as they come out of a forward pass (`capture`), or a
connector, out of a cache when a request has ended (`connector`), as in a server."""


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
    return {
        "model": str(verifier.path),
        "rows": str(rows),
        "contract": contract.document(),
        "shards": str(shards),
        "shard_bytes": params.shard_bytes,
        "events": str(events),
        # One more than the longest row: the engine also wants room for the token it generates.
        "max_model_len": max(todo.tokens(row) for row in range(len(todo))) + 2,
        "multimodal": verifier.facts.model_type == "kimi_k25",
        "cpu": not has_gpu(),
        # Who hands states over in vLLM. The worker has not been measured on a GPU yet.
        "by": CONNECTOR if has_gpu() else WORKER,
        # What a CPU backend can do with blocks is its own to know.
        "block_tokens": block_tokens(
            verifier.facts, contract.engine_bytes_per_token, params.engine.tensor_parallel
        )
        if has_gpu()
        else None,
        "engine": params.engine.model_dump(mode="json"),
        "head": {
            plain: [str(path), name] for plain, (path, name) in verifier.head_tensors().items()
        },
        "rms_norm_eps": verifier.facts.rms_norm_eps,
        "min_agreement": params.min_agreement,
        "max_bad_rows": params.max_bad_rows,
    }
