"""A draft in the form that SGLang reads: a plain `LlamaForCausalLMEagle3`. Imports torch.

Three things differ from speculators' form (sgl-project/sglang, `llama_eagle3.py` and
`set_eagle3_layers_to_capture`):

- the one decoder layer is called `midlayer`;
- aux layer ids stand in `eagle_config` and count the *output of layer i from 0*: SGLang captures
  what goes into layer id + 1, so its [1, 29, 57] are [2, 30, 58] where the input embeddings are 0;
- the rotary settings are `rope_theta` and `rope_scaling`, as transformers 4 has them.

`d2t` holds offsets in both. SGLang takes the embedding from the verifier; the draft's own is
written all the same, since other readers of the form load it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.draft.checkpoint import CONFIG, WEIGHTS, BadCheckpoint
from kimi_eagle.draft.eagle3 import DraftConfig, Eagle3
from kimi_eagle.draft.vocab import BadVocab, check_map

ARCHITECTURE = "LlamaForCausalLMEagle3"
_OURS, _THEIRS = "layers.0.", "midlayer."


def write_sglang(
    folder: Path, config: Mapping[str, Any], draft: DraftConfig, weights: Mapping[str, Any]
) -> None:
    """Write config.json and model.safetensors.

    Args:
        config: speculators' config.json, checked; `draft`: the numbers in it.
        weights: by speculators' names.

    Raises:
        BadCheckpoint: a draft that this form has no words for.
    """
    _refuse(draft)
    decoder = config["transformer_layer_config"]
    rope = dict(draft.rope)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type", "default")
    # Older readers look for `type`, newer ones for `rope_type`.
    scaling = None if kind == "default" else {"rope_type": kind, "type": kind, **rope}
    write_json(
        folder / CONFIG,
        {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": draft.hidden_size,
            "intermediate_size": decoder["intermediate_size"],
            "num_hidden_layers": draft.layers,
            "num_attention_heads": draft.heads,
            "num_key_value_heads": draft.kv_heads,
            "head_dim": draft.head_dim,
            "hidden_act": decoder.get("hidden_act", "silu"),
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": draft.rms_norm_eps,
            "max_position_embeddings": decoder["max_position_embeddings"],
            "rope_theta": theta,
            "rope_scaling": scaling,
            "vocab_size": draft.vocab_size,
            "draft_vocab_size": draft.draft_vocab_size,
            "tie_word_embeddings": False,
            "bos_token_id": decoder.get("bos_token_id"),
            "eos_token_id": decoder.get("eos_token_id"),
            "pad_token_id": decoder.get("pad_token_id"),
            "torch_dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in draft.aux_layers],
                "use_aux_hidden_state": True,
            },
        },
    )
    renamed = {
        _THEIRS + name.removeprefix(_OURS) if name.startswith(_OURS) else name: tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})


def _refuse(draft: DraftConfig) -> None:
    """Raises: BadCheckpoint for what SGLang would run otherwise than it was trained."""
    wrong = {
        f"{draft.layers} layers, it has one": draft.layers != 1,
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "a sliding window": any(draft.windows),
        "the input embeddings as an aux layer (id 0)": 0 in draft.aux_layers,
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise BadCheckpoint(f"SGLang's LlamaForCausalLMEagle3 cannot run {', '.join(found)}")


def read_sglang(folder: Path, device: str = "cpu") -> Eagle3:
    """The draft of such a folder, read as SGLang reads it.

    Raises:
        BadCheckpoint: what SGLang would guess is missing, a tensor is missing or of another shape,
            or the vocabulary map does not hold together.
    """
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    if config.get("architectures") != [ARCHITECTURE]:
        raise BadCheckpoint(f"architectures {config.get('architectures')} is not [{ARCHITECTURE}]")
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers or config.get("draft_vocab_size") is None or config.get("rope_theta") is None:
        raise BadCheckpoint(
            "eagle_aux_hidden_state_layer_ids, draft_vocab_size and rope_theta must be written: "
            "a server would guess them"
        )
    scaling = config.get("rope_scaling") or {}
    rope = {name: value for name, value in scaling.items() if name != "type"}
    rope["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    rope["rope_theta"] = config["rope_theta"]
    draft = DraftConfig(
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=rope,
        # SGLang captures what goes into layer id + 1, the output of as many layers.
        aux_layers=tuple(layer + 1 for layer in layers),
        windows=(None,) * config["num_hidden_layers"],
    )
    held = load_file(folder / WEIGHTS)
    _check_shapes(draft, config["intermediate_size"], held)
    tensors = {name.replace(_THEIRS, _OURS, 1): tensor for name, tensor in held.items()}
    return Eagle3(draft, tensors, device)


def _check_shapes(draft: DraftConfig, inner: int, held: Mapping[str, Any]) -> None:
    """Every tensor of the published layout, and no other."""
    hidden, wide = draft.hidden_size, 2 * draft.hidden_size
    query, key = draft.heads * draft.head_dim, draft.kv_heads * draft.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (draft.vocab_size, hidden),
        "fc.weight": (hidden, len(draft.aux_layers) * hidden),
        "lm_head.weight": (draft.draft_vocab_size, hidden),
        "norm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, wide),
        "midlayer.self_attn.k_proj.weight": (key, wide),
        "midlayer.self_attn.v_proj.weight": (key, wide),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    mapped = draft.draft_vocab_size != draft.vocab_size or "d2t" in held
    if mapped:
        shapes |= {"t2d": (draft.vocab_size,), "d2t": (draft.draft_vocab_size,)}
    found = {name: tuple(tensor.shape) for name, tensor in held.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise BadCheckpoint(
                f"{name} has shape {found.get(name)}, SGLang reads {shapes.get(name)}"
            )
    if mapped:
        try:
            check_map(held["t2d"], held["d2t"], draft.vocab_size, draft.draft_vocab_size)
        except BadVocab as error:
            raise BadCheckpoint(str(error)) from None
