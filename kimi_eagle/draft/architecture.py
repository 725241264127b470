"""The draft's decoder configuration, from the verifier's facts and the manifest. Pure."""

from __future__ import annotations

from typing import Any

from kimi_eagle.stages.train.spec import DraftArchitecture
from kimi_eagle.verifiers.facts import VerifierFacts


def decoder_config(draft: DraftArchitecture, facts: VerifierFacts) -> dict[str, Any]:
    """transformers' Llama configuration of the draft's decoder.

    Hidden size, vocabulary, norm epsilon, positions and the rotary embedding (theta and scaling:
    a silent 10000, or no YaRN, ruins acceptance on long contexts) are always the verifier's. Key
    and value heads are as many as query heads where the verifier uses MLA, which has none.
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
        "rope_parameters": dict(facts.rope),
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
