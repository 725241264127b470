"""Hold the evaluation against the gate, write the folder, and check it as it was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.draft.checkpoint import CONFIG, WEIGHTS, BadCheckpoint, check_checkpoint
from kimi_eagle.draft.eagle3 import Eagle3, UnknownDraft
from kimi_eagle.draft.reading import draft_config, read_draft
from kimi_eagle.draft.release import check_against, check_published, same_logits
from kimi_eagle.draft.sglang import read_sglang, write_sglang
from kimi_eagle.job import StageFailed
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.export.card import Origin, model_card
from kimi_eagle.stages.export.gate import belongs, gate
from kimi_eagle.stages.export.push import push


def run(context: Context) -> dict[str, Any]:
    params = context.params
    evaluation = json.loads((context.path("evaluation") / "evaluation.json").read_text("utf-8"))
    digests = {role: context.input(role).digest for role in ("checkpoint", "verifier")}
    lacking = belongs(evaluation, **digests) or gate(evaluation, params.gate)
    if lacking:
        raise StageFailed("not released: " + "; ".join(map(str, lacking)))
    out = context.out("release")
    try:
        config = _write(context, out)
    except (BadCheckpoint, UnknownDraft) as error:
        raise StageFailed(f"not released: {error}") from None
    origin = Origin(
        checkpoint=digests["checkpoint"],
        evaluation=context.input("evaluation").digest,
        verifier=digests["verifier"],
        rows=_reported(context, "rows"),
        vocab=_reported(context, "vocab"),
    )
    write_text(
        out / "README.md",
        model_card(params.target, params.license, params.base_model, evaluation, origin, config),
    )
    metrics = {
        "bytes": sum(item.stat().st_size for item in out.iterdir()),
        "acceptance_length": evaluation["acceptance_length"],
        "checkpoint": digests["checkpoint"],
        "target": params.target,
    }
    if params.push is not None:
        done = push(out, params.push, context.scratch("push"))
        context.events.note(done)
        metrics["pushed"] = done
    return metrics


def _write(context: Context, out: Path) -> dict[str, Any]:
    """Write config and weights in the target's form, read them again, and hold them against the
    checkpoint and the verifier; returns the checkpoint's config.

    Raises: BadCheckpoint, UnknownDraft.
    """
    params, checkpoint = context.params, context.path("checkpoint")
    config = check_checkpoint(checkpoint)
    weights = load_file(checkpoint / WEIGHTS)
    trained = Eagle3(draft_config(config), weights)
    check_against(context.verifier, config, trained, weights)
    if params.target == "sglang":
        write_sglang(out, config, trained.config, weights)
        written = read_sglang(out)
    else:
        config["speculators_config"]["verifier"]["name_or_path"] = params.base_model
        write_json(out / CONFIG, config)
        shutil.copyfile(checkpoint / WEIGHTS, out / WEIGHTS)
        written = read_draft(out)
    check_published(out)
    same_logits(trained, written)
    return config


def _reported(context: Context, role: str) -> dict[str, Any] | None:
    """The report of an artifact that the checkpoint was made from."""
    if role not in context.job.inputs:
        return None
    try:
        found = json.loads((context.path(role) / "report.json").read_text("utf-8"))
    except (OSError, ValueError):
        found = {}
    return {**found, "digest": context.input(role).digest}
