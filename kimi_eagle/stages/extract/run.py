"""Ask the store which rows it has, run the verifier over the others, list them all in order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.engines.extraction import extraction_job
from kimi_eagle.engines.launch import cpu_build, engine_environment, environment, run_program
from kimi_eagle.engines.todo import Todo
from kimi_eagle.identity import row_key
from kimi_eagle.job import EVENTS, StageFailed
from kimi_eagle.rows.table import Rows, load_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.extract.figures import together
from kimi_eagle.states.checks import BadStates
from kimi_eagle.states.contract import LayerContract, contract_of
from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import CONTRACT, ROWS, StateRow, write_rows
from kimi_eagle.states.refusals import Refusals


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
    lengths = np.diff(rows.offsets)
    before = [dict(part) for part in context.job.parts]
    away = {key for part in before for key in part["refused"]}
    missing = {
        key: row
        for row, key in enumerate(keys)
        if key not in digests and key not in away and _is_ours(context, row)
    }
    found: dict[str, Any] = {"agreement": None, "next_best": None, "probed": 0, "refused": {}}
    if missing:
        found = _extract(context, contract, rows, missing)
        digests.update(found["digests"])
    extracted = int(sum(lengths[row] for row in missing.values()))
    stored = int(sum(lengths[row] for key, row in missing.items() if key not in found["refused"]))
    mine = {
        **{name: value for name, value in found.items() if name != "digests"},
        "rows_extracted": len(missing),
        "tokens_extracted": extracted,
        "bytes_written": stored * contract.bytes_per_token,
    }
    if context.job.share is not None:
        return mine
    if before:
        mine = together([*before, mine])
        _limited(context, mine)
    out = context.out("states")
    refused = mine["refused"]
    write_text(
        out / ROWS,
        write_rows(
            StateRow(key, digests.get(key, ""), int(length), refused.get(key, ""))
            for key, length in zip(keys, lengths, strict=True)
        ),
    )
    write_json(out / CONTRACT, document)
    return {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "rows_extracted": mine["rows_extracted"],
        "tokens_extracted": mine["tokens_extracted"],
        "bytes_written": mine["bytes_written"],
        "layers": list(contract.layers),
        "agreement": mine["agreement"],
        "next_best": mine["next_best"],
        "probed": mine["probed"],
        **({"fp8_error": mine["fp8_error"]} if mine.get("fp8_error") else {}),
        **({"refused": dict(sorted(Counter(refused.values()).items()))} if refused else {}),
        **({"workers": len(before)} if before else {}),
    }


def _is_ours(context: Context, row: int) -> bool:
    """Whether a row is in this worker's share. Every row is in one, whatever the store holds."""
    share = context.job.share
    return share is None or row % share[1] == share[0]


def _limited(context: Context, figures: dict[str, Any]) -> None:
    """Hold what all workers refused against the limit of the stage. Raises: StageFailed."""
    limit = Refusals(context.params.max_bad_rows, figures["rows_extracted"], lambda _: None)
    for key, reason in figures["refused"].items():
        limit.add(key, BadStates(reason, reason))


def _extract(
    context: Context, contract: LayerContract, rows: Rows, missing: dict[str, int]
) -> dict[str, Any]:
    params = context.params
    folder = context.scratch("engine")
    todo = folder / "rows.npz"
    Todo.write(todo, {key: rows.ids(row) for key, row in missing.items()})
    job = extraction_job(
        context.verifier,
        contract,
        params,
        todo,
        context.shards,
        Path(context.job.folder) / EVENTS,
    )
    if params.engine.kind == "transformers":
        return run_program("kimi_eagle.engines.transformers_extract", job, folder, environment())
    if params.engine.endpoint is not None:
        return run_program("kimi_eagle.engines.endpoint_extract", job, folder, environment())
    if job["cpu"] != cpu_build():
        raise StageFailed(
            "this machine has "
            + (
                "no GPU, but vLLM here is a GPU build: install kimi-eagle[cpu]"
                if job["cpu"]
                else "a GPU, but vLLM here is the CPU build: install kimi-eagle[gpu]"
            )
        )
    return run_program(
        "kimi_eagle.engines.vllm_extract", job, folder, engine_environment(params.engine)
    )
