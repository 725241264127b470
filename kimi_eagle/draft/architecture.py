"""The draft's decoder configuration, from the verifier's facts and the manifest. Pure."""

from __future__ import annotations

from typing import Any

from kimi_eagle.stages.train.spec import DraftArchitecture
from kimi_eagle.verifiers.facts import VerifierFacts


def decoder_config(draft: DraftArchitecture, facts: VerifierFacts) -> dict[str, Any]:
    """transformers' Llama configuration of the draft's decoder.

    Hidden size, vocabulary, norm epsilon and positions are always the verifier's; the rotary
    embedding (theta and scaling: a silent 10000, or no YaRN, ruins acceptance on long contexts) is
    unless the manifest says otherwise. Key and value heads are as many as query heads where the
    verifier uses MLA, which has none.
    """
    heads = draft.heads or facts.num_heads
    layers = draft.layers
    window = draft.sliding_window
    return {
        "model_type": "llama",
        "hidden_size": facts.hidden_size,
        "intermediate_size": draft.intermediate_size or facts.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draft.kv_heads or min(heads, facts.num_kv_heads),
        "head_dim": draft.head_dim or facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_positions,
        "rms_norm_eps": facts.rms_norm_eps,
        "rope_parameters": _rope(draft, facts),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": facts.eos_token_id,
        "pad_token_id": facts.pad_token_id,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window else "full_attention"] * layers,
    }


def _rope(draft: DraftArchitecture, facts: VerifierFacts) -> dict[str, Any]:
    """transformers' `rope_parameters`: the verifier's, and what the manifest puts in its place."""
    found = dict(facts.rope)
    if draft.rope_scaling is not None:
        scaling = draft.rope_scaling.model_dump(exclude_none=True)
        found = {"rope_theta": facts.rope["rope_theta"], **scaling}
        if draft.rope_scaling.rope_type in ("yarn", "llama3"):
            found.setdefault("original_max_position_embeddings", facts.max_positions)
    if draft.rope_theta is not None:
        found["rope_theta"] = draft.rope_theta
    return found
