"""Small drafts in speculators' form, made of nothing but their published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = [2, 4, 5]
VOCAB, DRAFT_VOCAB, HIDDEN, HEADS, HEAD_DIM, INNER = 64, 16, 8, 2, 4, 16
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def write_draft(folder: Path, layers: int = 1, kv_heads: int = 2, **config: Any) -> Path:
    """A checkpoint folder with random weights, as large as trained ones: near zero, every forward
    pass looks like another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_document(layers, kv_heads) | config))
    save_file(draft_tensors(layers, kv_heads), folder / "model.safetensors")
    return folder


def draft_document(layers: int = 1, kv_heads: int = 2) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": ROPE,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "sliding_window": None,
            "layer_types": ["full_attention"] * layers,
        },
    }


def draft_tensors(layers: int = 1, kv_heads: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) / 2).to(torch.bfloat16)

    tensors = {
        "embed_tokens.weight": made(VOCAB, HIDDEN),
        "fc.weight": made(HIDDEN, len(LAYERS) * HIDDEN),
        "lm_head.weight": made(DRAFT_VOCAB, HIDDEN),
        "norm.weight": made(HIDDEN) + 1,
        "t2d": torch.zeros(VOCAB, dtype=torch.bool),
        "d2t": torch.arange(DRAFT_VOCAB) * 3,
    }
    tensors["t2d"][::4] = True
    for layer in range(layers):
        wide = 2 * HIDDEN if layer == 0 else HIDDEN
        at = f"layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": made(HEADS * HEAD_DIM, wide),
            f"{at}.self_attn.k_proj.weight": made(kv_heads * HEAD_DIM, wide),
            f"{at}.self_attn.v_proj.weight": made(kv_heads * HEAD_DIM, wide),
            f"{at}.self_attn.o_proj.weight": made(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": made(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": made(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": made(HIDDEN, INNER),
            f"{at}.input_layernorm.weight": made(HIDDEN) + 1,
            f"{at}.post_attention_layernorm.weight": made(HIDDEN) + 1,
        }
        if layer == 0:
            tensors[f"{at}.hidden_norm.weight"] = made(HIDDEN) + 1
    return tensors
