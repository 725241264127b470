"""Ask the store which rows it has, run the verifier over the others, list them all in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.engines.launch import cpu_build, environment, has_gpu, run_program
from kimi_eagle.identity import row_key
from kimi_eagle.job import EVENTS, StageFailed
from kimi_eagle.rows.table import Rows, load_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.states.contract import LayerContract, contract_of
from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import CONTRACT, ROWS, StateRow, write_rows


def run(context: Context) -> dict[str, Any]:
    params, facts = context.params, context.verifier.facts
    rows = load_rows(context.path("rows"))
    contract = contract_of(params, facts)
    verifier = context.input("verifier").digest
    document = contract.document()
    keys = [row_key(verifier, document, rows.id_bytes(row)) for row in range(len(rows))]
    index = StateIndex(Path(context.job.registry))
    digests = {key: place.digest for key, place in index.places(keys).items()}
    index.close()
    missing = {key: row for row, key in enumerate(keys) if key not in digests}
    found: dict[str, Any] = {"agreement": None, "probed": 0}
    if missing:
        found = _extract(context, contract, rows, missing)
        digests.update(found["digests"])
    lengths = np.diff(rows.offsets)
    out = context.out("states")
    write_text(
        out / ROWS,
        write_rows(
            StateRow(key, digests[key], int(length))
            for key, length in zip(keys, lengths, strict=True)
        ),
    )
    write_json(out / CONTRACT, document)
    tokens = int(sum(lengths[row] for row in missing.values()))
    return {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "rows_extracted": len(missing),
        "tokens_extracted": tokens,
        "bytes_written": tokens * contract.bytes_per_token,
        "layers": list(contract.layers),
        "agreement": found["agreement"],
        "probed": found["probed"],
    }


def _extract(
    context: Context, contract: LayerContract, rows: Rows, missing: dict[str, int]
) -> dict[str, Any]:
    params, verifier = context.params, context.verifier
    folder = context.scratch("engine")
    order = list(missing.values())
    lengths = [len(rows.ids(row)) for row in order]
    np.savez(
        folder / "rows.npz",
        keys=np.array([key.encode() for key in missing]),
        token_ids=np.concatenate([rows.ids(row) for row in order]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )
    engine = params.engine.model_dump(mode="json")
    job = {
        "model": str(verifier.path),
        "rows": str(folder / "rows.npz"),
        "contract": contract.document(),
        "shards": str(context.shards),
        "shard_bytes": params.shard_bytes,
        "scratch": str(folder / "files"),
        "events": str(Path(context.job.folder) / EVENTS),
        # One more than the longest row: the engine also wants room for the token it generates.
        "max_model_len": max(lengths) + 2,
        "multimodal": verifier.facts.model_type == "kimi_k25",
        "cpu": not has_gpu(),
        "engine": engine,
        "head": {
            plain: [str(path), name] for plain, (path, name) in verifier.head_tensors().items()
        },
        "rms_norm_eps": verifier.facts.rms_norm_eps,
        "min_agreement": params.min_agreement,
    }
    if params.engine.kind == "vllm":
        if job["cpu"] != cpu_build():
            raise StageFailed(
                "this machine has "
                + (
                    "no GPU, but vLLM here is a GPU build: install kimi-eagle[cpu]"
                    if job["cpu"]
                    else "a GPU, but vLLM here is the CPU build: install kimi-eagle[gpu]"
                )
            )
        env = environment(params.engine.cpu_kv_cache_gib)
        return run_program("kimi_eagle.engines.vllm_extract", job, folder, env)
    return run_program("kimi_eagle.engines.transformers_extract", job, folder, environment())
