"""Extract hidden states with vLLM: a program (see `engines.launch`)."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from kimi_eagle.engines.launch import main
from kimi_eagle.engines.probe import Probe, probe_rows
from kimi_eagle.engines.vllm_options import common_options
from kimi_eagle.job import EventWriter, StageFailed
from kimi_eagle.states.checks import BadStates, check_states
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.shards import ShardWriter

# Rows handed to the engine at once: enough to fill its batches, few enough to keep what lies on
# the disk twice small.
CHUNK_TOKENS = 65_536


def extract(job: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    todo = np.load(job["rows"])
    keys = [bytes(key).decode() for key in todo["keys"]]
    offsets, ids = todo["offsets"], todo["token_ids"]
    contract = LayerContract(**{**job["contract"], "layers": tuple(job["contract"]["layers"])})
    events = EventWriter(Path(job["events"]))
    writer = ShardWriter(
        Path(job["shards"]),
        contract,
        job["shard_bytes"],
        lambda name: events.emit("shard", name=name),
    )
    probe = Probe(job["head"], job["rms_norm_eps"])
    files = Path(job["scratch"])
    files.mkdir(parents=True, exist_ok=True)
    connector: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    if job["cpu"]:
        connector["kv_connector"] = "CpuHiddenStatesConnector"
        connector["kv_connector_module_path"] = "kimi_eagle.engines.cpu_connector"
    llm = LLM(
        **common_options(job),
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(contract.layers)}
            },
        },
        kv_transfer_config=connector,
    )
    plain = SamplingParams(temperature=0.0, max_tokens=1)
    # The engine's own choice at every position of the first rows, to prove the states by.
    ranked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    probing = probe_rows(offsets)
    for first, last in [(0, probing), *_chunks(offsets, probing)]:
        sent = [ids[offsets[row] : offsets[row + 1]] for row in range(first, last)]
        outputs = _generate(
            llm,
            [{"prompt_token_ids": row.tolist()} for row in sent],
            plain if first else ranked,
        )
        taken = []
        for row, output, tokens in zip(range(first, last), outputs, sent, strict=True):
            found = _take(Path(output.kv_transfer_params["hidden_states_path"]))
            states = found["hidden_states"]
            try:
                check_states(
                    states,
                    found["token_ids"],
                    torch.from_numpy(tokens.astype(np.int64)),
                    len(contract.layers),
                    contract.hidden_size,
                )
            except BadStates as error:
                raise StageFailed(f"row {keys[row][:12]}: {error}") from None
            if row < probing:
                probe.add(states, _first_ranked(output))
            taken.append((keys[row], states, found["token_ids"]))
        if not first:
            probe.require(job["min_agreement"])
        for item in taken:
            writer.add(*item)
        events.progress(last, len(keys), "rows")
    writer.flush()
    return {"digests": writer.digests, "agreement": probe.agreement, "probed": probe.count}


def _generate(llm: Any, prompts: list[dict[str, Any]], sampling: Any) -> Any:
    """As `llm.generate`, with all prompts in the queue before the first is taken from it.

    Otherwise the engine, which is a process of its own, begins as soon as it has one, and how many
    have reached it by then decides what shares a batch, and so the last bits of the sums: the same
    rows would come out another now and then.
    """
    if not hasattr(llm, "enqueue"):  # an older vLLM
        return llm.generate(prompts, sampling, use_tqdm=False)
    llm.sleep(level=0, mode="keep")
    llm.enqueue(prompts, sampling, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    return llm.wait_for_completion(use_tqdm=False)


def _first_ranked(output: Any) -> list[int]:
    """The token the engine ranks first after each position of a prompt, the last included."""
    after = [
        next(token for token, entry in ranked.items() if entry.rank == 1)
        for ranked in output.prompt_logprobs[1:]
    ]
    return [*after, output.outputs[0].token_ids[0]]


def _chunks(offsets: Any, first: int) -> list[tuple[int, int]]:
    chunks = []
    for row in range(first + 1, len(offsets)):
        if offsets[row] - offsets[first] >= CHUNK_TOKENS or row == len(offsets) - 1:
            chunks.append((first, row))
            first = row
    return chunks


def _take(path: Path) -> dict[str, Any]:
    """Wait for the writer to let go of a file, read it, and remove it.

    The file is written by another thread after the request has ended, and the lock file stays
    until a reader has seen it unlocked; waiting for its absence would wait for ever.
    """
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        descriptor = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)
    if not path.exists():
        raise StageFailed(f"the engine did not write {path.name}; see the log (disk full?)")
    found: dict[str, Any] = load_file(path)
    path.unlink()
    lock.unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    sys.exit(main(extract))
