"""A draft's checkpoint folder: config.json and model.safetensors, as serving reads them.

Imports torch. Nothing in it tells where it was made: speculators writes the verifier's path into
config.json, which is taken out, so that equal training has equal bytes wherever it ran.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_eagle.artifacts.files import write_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# speculators fills frozen weights with NaN until they are loaded, and leaves these two out.
_NOT_SAVED = ("verifier_lm_head.weight", "verifier_norm.weight")


class BadCheckpoint(ValueError):
    """A checkpoint that must not be served; the message names what is wrong."""


def write_checkpoint(
    folder: Path, config: Any, weights: dict[str, Any], verifier: str | None
) -> None:
    """Write a checkpoint and check it.

    Args:
        config: speculators' `Eagle3SpeculatorConfig`.
        weights: name → tensor, floating ones in bf16.
        verifier: the verifier's public name, or None.

    Raises:
        BadCheckpoint: see `check_checkpoint`.
    """
    document = json.loads(json.dumps(config.to_dict()))
    document["speculators_config"]["verifier"]["name_or_path"] = verifier
    document["dtype"] = "bfloat16"
    # to_dict leaves out of a nested config what equals its class's default today.
    document["transformer_layer_config"] = _whole(config.transformer_layer_config)
    document.pop("_name_or_path", None)
    saved = {
        name: tensor.contiguous()
        for name, tensor in weights.items()
        if name not in _NOT_SAVED and tensor is not None
    }
    write_json(folder / CONFIG, document)
    save_file(saved, folder / WEIGHTS, metadata={"format": "pt"})
    check_checkpoint(folder)


def _whole(config: Any) -> dict[str, Any]:
    document = dict(json.loads(json.dumps(config.to_dict())))
    for name in ("_name_or_path", "transformers_version", "_attn_implementation"):
        document.pop(name, None)
    return document


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """Refuse a checkpoint that would not serve as it was trained; returns its config.

    Raises:
        BadCheckpoint: aux layer ids or draft_vocab_size missing, sizes that do not fit the
            tensors, the rotary settings missing, or a tensor that is not finite.
    """
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    weights = load_file(folder / WEIGHTS)
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        raise BadCheckpoint(
            "config.json has no eagle_aux_hidden_state_layer_ids: a server would guess the layers"
        )
    decoder = config.get("transformer_layer_config") or {}
    hidden, vocab = int(decoder.get("hidden_size", 0)), int(decoder.get("vocab_size", 0))
    draft_vocab = config.get("draft_vocab_size")
    if not draft_vocab:
        raise BadCheckpoint("config.json has no draft_vocab_size")
    rope = decoder.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        raise BadCheckpoint("config.json has no rope_theta: a server would take 10000")
    expected = {
        "fc.weight": (hidden, len(layers) * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (draft_vocab, hidden),
    }
    for name, shape in expected.items():
        if name not in weights:
            raise BadCheckpoint(f"model.safetensors lacks {name}")
        if tuple(weights[name].shape) != shape:
            raise BadCheckpoint(
                f"{name} has shape {list(weights[name].shape)}; config.json says {list(shape)}"
            )
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadCheckpoint(f"{name} holds numbers that are not finite")
    if draft_vocab != vocab and not {"t2d", "d2t"} <= set(weights):
        raise BadCheckpoint("a reduced vocabulary without t2d and d2t")
    return dict(config)
