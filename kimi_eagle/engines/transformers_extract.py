"""Extract hidden states with transformers, one row at a time: the reference. A program."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_eagle.engines.launch import main
from kimi_eagle.engines.probe import Probe, probe_rows
from kimi_eagle.engines.todo import Todo
from kimi_eagle.job import EventWriter
from kimi_eagle.states.checks import BadStates, check_states
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.refusals import Refusals
from kimi_eagle.states.shards import ShardWriter
from kimi_eagle.states.spool import Spool
from kimi_eagle.states.stored_row import as_stored


def extract(job: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    todo = Todo(job["rows"])
    contract = LayerContract.of(job["contract"])
    events = EventWriter(Path(job["events"]))
    writer = ShardWriter(
        Path(job["shards"]),
        contract,
        job["shard_bytes"],
        lambda name: events.emit("shard", name=name),
    )
    probe = Probe(job["head"], job["rms_norm_eps"], contract.layers)
    refusals = Refusals(job["max_bad_rows"], len(todo), events.note)
    loader = AutoModelForImageTextToText if job["multimodal"] else AutoModelForCausalLM
    device = "cpu" if job["cpu"] else "cuda"
    model = loader.from_pretrained(job["model"], dtype=torch.bfloat16, local_files_only=True)
    model = model.to(device).eval()
    language = model.model.language_model if job["multimodal"] else model.model
    before_norm: dict[str, Any] = {}
    # transformers' last hidden state is after the final norm; what is stored is its input.
    language.norm.register_forward_pre_hook(
        lambda _module, inputs: before_norm.__setitem__("last", inputs[0].detach())
    )
    last_layer = len(language.layers)
    probing = probe_rows(todo.offsets)
    held: list[tuple[str, Any, Any]] = []
    done = 0
    for row, key in enumerate(todo.keys):
        tokens = torch.from_numpy(todo.ids(row).astype(np.int64))
        with torch.inference_mode():
            output = model(
                input_ids=tokens[None].to(device), output_hidden_states=True, use_cache=False
            )
        states = torch.stack(
            [
                (before_norm["last"] if layer == last_layer else output.hidden_states[layer])[0]
                for layer in contract.layers
            ],
            dim=1,
        )
        states = states.to("cpu", torch.bfloat16)
        try:
            check_states(states, tokens, tokens, len(contract.layers), contract.hidden_size)
        except BadStates as error:
            refusals.add(key, error)
        else:
            if row < probing:
                probe.add(as_stored(states, contract), output.logits[0].argmax(-1).tolist())
                held.append((key, states, tokens))
            else:
                writer.add(key, states, tokens)
        if row == probing - 1:
            probe.require(job["min_agreement"])
            Spool(Path(job["shards"])).prove()
            for item in held:
                writer.add(*item)
        done += len(tokens)
        events.progress(done, todo.all_tokens, "tokens")
    refusals.require(len(writer.digests))
    writer.flush()
    return {
        "digests": writer.digests,
        "agreement": probe.agreement,
        "next_best": probe.next_best,
        "probed": probe.count,
        "refused": refusals.rows,
        "fp8_error": writer.lost.relative(),
    }


if __name__ == "__main__":
    sys.exit(main(extract))
