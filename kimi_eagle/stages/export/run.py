"""Hold the evaluation against the gate, write the folder, and check it as it was written."""

from __future__ import annotations

import json
import shutil
from typing import Any

import torch
from safetensors.torch import load_file

from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.draft.checkpoint import CONFIG, WEIGHTS, BadCheckpoint, check_checkpoint
from kimi_eagle.job import StageFailed
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.evaluate.acceptance import gate
from kimi_eagle.stages.export.card import model_card


def run(context: Context) -> dict[str, Any]:
    params = context.params
    checkpoint = context.path("checkpoint")
    evaluation = json.loads((context.path("evaluation") / "evaluation.json").read_text("utf-8"))
    lacking = gate(
        evaluation,
        params.gate.min_acceptance_length,
        params.gate.min_first_position,
        params.gate.outputs_identical,
        params.gate.refuse_collapse,
    )
    if lacking:
        raise StageFailed("not released: " + "; ".join(map(str, lacking)))
    out = context.out("release")
    try:
        config = check_checkpoint(checkpoint)
        config["speculators_config"]["verifier"]["name_or_path"] = params.base_model
        write_json(out / CONFIG, config)
        shutil.copyfile(checkpoint / WEIGHTS, out / WEIGHTS)
        check_checkpoint(out)
    except BadCheckpoint as error:
        raise StageFailed(f"not released: {error}") from None
    _same_weights(load_file(checkpoint / WEIGHTS), load_file(out / WEIGHTS))
    write_text(
        out / "README.md",
        model_card(
            f"{(params.base_model or 'draft').rsplit('/', 1)[-1]}-eagle3",
            params.license,
            params.base_model,
            evaluation,
            context.input("checkpoint").digest,
            config,
        ),
    )
    return {
        "bytes": sum(item.stat().st_size for item in out.iterdir()),
        "acceptance_length": evaluation["acceptance_length"],
        "checkpoint": context.input("checkpoint").digest,
    }


def _same_weights(trained: dict[str, Any], written: dict[str, Any]) -> None:
    if set(trained) != set(written):
        raise StageFailed("not released: the export holds other tensors than the checkpoint")
    for name, tensor in trained.items():
        if not torch.equal(tensor, written[name]):
            raise StageFailed(f"not released: {name} differs from the checkpoint's")
