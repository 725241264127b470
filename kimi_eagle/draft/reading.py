"""A checkpoint folder in speculators' form → a draft that can be run. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kimi_eagle.draft.checkpoint import WEIGHTS, check_checkpoint
from kimi_eagle.draft.eagle3 import DraftConfig, Eagle3, UnknownDraft


def read_draft(folder: Path, device: str = "cpu") -> Eagle3:
    """The draft of a checkpoint or of a `vllm` release.

    Raises:
        BadCheckpoint: see `check_checkpoint`.
        UnknownDraft: a decoder that is not Llama's, or a rotary scaling that is not known.
    """
    config = draft_config(check_checkpoint(folder))
    return Eagle3(config, load_file(folder / WEIGHTS), device)


def draft_config(config: Mapping[str, Any]) -> DraftConfig:
    """The numbers of a speculators config.json.

    Raises: UnknownDraft for a decoder that is not Llama's.
    """
    decoder = config["transformer_layer_config"]
    kind = decoder.get("model_type", "llama")
    if kind != "llama":
        raise UnknownDraft(f"a draft with a decoder of kind {kind} is not known; llama is")
    layers, heads = int(decoder["num_hidden_layers"]), int(decoder["num_attention_heads"])
    window = decoder.get("sliding_window")
    kinds = decoder.get("layer_types") or ["full_attention"] * layers
    return DraftConfig(
        hidden_size=int(decoder["hidden_size"]),
        layers=layers,
        heads=heads,
        kv_heads=int(decoder.get("num_key_value_heads") or heads),
        head_dim=int(decoder.get("head_dim") or decoder["hidden_size"] // heads),
        vocab_size=int(decoder["vocab_size"]),
        draft_vocab_size=int(config["draft_vocab_size"]),
        rms_norm_eps=float(decoder["rms_norm_eps"]),
        rope=decoder["rope_parameters"],
        aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        windows=tuple(window if name == "sliding_attention" else None for name in kinds),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )
