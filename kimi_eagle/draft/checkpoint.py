"""A draft's checkpoint folder: config.json and model.safetensors, as serving reads them.

Imports torch. Nothing in it tells where it was made: speculators writes the verifier's path into
config.json, which is taken out, so that equal training has equal bytes wherever it ran.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.draft.vocab import BadVocab, check_map

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# speculators fills frozen weights with NaN until they are loaded, and leaves these two out.
_NOT_SAVED = ("verifier_lm_head.weight", "verifier_norm.weight")
_PUBLIC_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


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
            tensors, the rotary settings missing, a vocabulary map that does not hold together, a
            path of this machine, a tensor that is not finite, or one that was never filled.
    """
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder.name} cannot be read: {error}") from None
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        raise BadCheckpoint(
            "config.json has no eagle_aux_hidden_state_layer_ids: a server would guess the layers"
        )
    if layers != sorted(set(layers)):
        raise BadCheckpoint(f"eagle_aux_hidden_state_layer_ids {layers} repeat or go down")
    decoder = config.get("transformer_layer_config") or {}
    hidden, vocab = int(decoder.get("hidden_size", 0)), int(decoder.get("vocab_size", 0))
    draft_vocab = config.get("draft_vocab_size")
    if not draft_vocab:
        raise BadCheckpoint("config.json has no draft_vocab_size")
    _check_rope(decoder.get("rope_parameters") or {})
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if verifier is not None and not _PUBLIC_NAME.fullmatch(str(verifier)):
        raise BadCheckpoint(f"config.json names the verifier by a path, {verifier}")
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
    for name in expected:
        if not bool(weights[name].any()):
            raise BadCheckpoint(f"{name} is zero throughout: it was never filled")
    _check_vocab(weights, vocab, draft_vocab)
    return dict(config)


def _check_rope(rope: dict[str, Any]) -> None:
    if "rope_theta" not in rope:
        raise BadCheckpoint("config.json has no rope_theta: a server would take 10000")
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "longrope") and "factor" not in rope:
        raise BadCheckpoint(f"config.json has {kind} scaling without its factor")


def _check_vocab(weights: dict[str, Any], vocab: int, draft_vocab: int) -> None:
    mapped = {"t2d", "d2t"} & set(weights)
    if draft_vocab == vocab and not mapped:
        return
    if mapped != {"t2d", "d2t"}:
        raise BadCheckpoint(
            f"a draft vocab of {draft_vocab} out of {vocab} without t2d and d2t"
            if draft_vocab != vocab
            else "one of t2d and d2t without the other"
        )
    t2d, d2t = weights["t2d"], weights["d2t"]
    if t2d.dtype != torch.bool or d2t.dtype != torch.int64:
        raise BadCheckpoint(f"t2d must be bool and d2t int64, found {t2d.dtype} and {d2t.dtype}")
    try:
        check_map(t2d, d2t, vocab, draft_vocab)
    except BadVocab as error:
        raise BadCheckpoint(str(error)) from None
