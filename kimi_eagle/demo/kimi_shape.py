"""A verifier with Kimi-K2.5's dimensions and a few layers of made-up weights.

    python -m kimi_eagle.demo.kimi_shape CONFIG_FOLDER OUT [--layers 4] [--experts 16] [--tiny]

CONFIG_FOLDER holds Kimi's config.json and tokenizer. OUT becomes a folder that transformers and
vLLM load without code of its own: hidden size, vocabulary, attention, feed-forward sizes and tensor
names are Kimi's; layers and experts are few, in bf16, and the vision tower is a tiny one, so that
it fits one GPU (11 GB with the defaults). It proves memory, speed and file sizes, not acceptance.

What it says is fixed: after token n it says n + 1. The residual stream is led by the token's
embedding, and row n + 1 of the output head is that embedding again. Logits of plainly random
weights lie so close together that bf16 alone tips about one next token in twelve, and the proof
that stored states are the verifier's allows for fewer. `--tiny` makes all sizes but the
vocabulary's those of the demo.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kimi_eagle.demo.checkpoint import VISION, preprocessor_config, write_json
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import INDEX, open_folder

PREFIX = "language_model."
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
# Of a code that is not there, of a quantization that is not done, and of sizes that follow others.
_LEFT_OUT = ("auto_map", "quantization_config", "head_dim", "qk_head_dim")
_QUIET = 0.1
"""What a layer adds to the residual stream, beside what it would with weights of unit gain."""

Shapes = dict[str, tuple[int, ...]]


def shaped(config: dict[str, Any], layers: int, experts: int, tiny: bool) -> dict[str, Any]:
    """Kimi's config.json with so many layers and experts. Pure.

    Raises:
        VerifierError: it is not one of Kimi-K2.5's form.
    """
    if config.get("model_type") != "kimi_k25" or not isinstance(config.get("text_config"), dict):
        raise VerifierError("config.json is not Kimi-K2.5's: its model_type must be kimi_k25")
    found = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    text = {key: value for key, value in config["text_config"].items() if key not in _LEFT_OUT}
    text.update(TINY if tiny else {})
    text["num_hidden_layers"] = layers
    text["n_routed_experts"] = experts
    text["num_experts_per_tok"] = min(text["num_experts_per_tok"], experts)
    found["text_config"] = text
    found["vision_config"] = {"model_type": "kimi_k25_vision", **VISION}
    found["projection_hidden_size"] = VISION["hidden_size"]
    found.setdefault("image_token_id", config.get("media_placeholder_token_id"))
    return found


def layer_shapes(text: dict[str, Any], number: int) -> Shapes:
    """The tensors of one decoder layer under the hub's names."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = (text[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    queries, latent = text["q_lora_rank"], text["kv_lora_rank"]
    found: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (queries, hidden),
        "self_attn.q_a_layernorm.weight": (queries,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), queries),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if number < text["first_k_dense_replace"]:
        found |= _mlp("mlp", hidden, text["intermediate_size"])
    else:
        experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
        found["mlp.gate.weight"] = (experts, hidden)
        found["mlp.gate.e_score_correction_bias"] = (experts,)
        found |= _mlp("mlp.shared_experts", hidden, inner * text["n_shared_experts"])
        for expert in range(experts):
            found |= _mlp(f"mlp.experts.{expert}", hidden, inner)
    return {f"{PREFIX}model.layers.{number}.{name}": shape for name, shape in found.items()}


def _mlp(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def vision_shapes(text_hidden: int) -> Shapes:
    """The tensors of the tiny vision tower and of its way into the language model."""
    width, inner, patch = (VISION[n] for n in ("hidden_size", "intermediate_size", "patch_size"))
    merged = 4 * width
    found: Shapes = {
        "mm_projector.pre_norm.weight": (width,),
        "mm_projector.pre_norm.bias": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text_hidden, merged),
        "mm_projector.proj.2.bias": (text_hidden,),
        "vision_tower.patch_embed.pos_emb.weight": (
            VISION["pos_emb_height"],
            VISION["pos_emb_width"],
            width,
        ),
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "vision_tower.encoder.final_layernorm.bias": (width,),
    }
    block: Shapes = {
        "norm0": (width,),
        "norm1": (width,),
        "wqkv": (3 * width, width),
        "wo": (width, width),
        "mlp.fc0": (inner, width),
        "mlp.fc1": (width, inner),
    }
    for name, shape in block.items():
        found[f"vision_tower.encoder.blocks.0.{name}.weight"] = shape
        found[f"vision_tower.encoder.blocks.0.{name}.bias"] = shape[:1]
    return found


class Weights:
    """Draws tensors, the same for one seed on one kind of device."""

    def __init__(self, seed: int):
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self._device)
        return (drawn * std).to(torch.bfloat16).cpu()

    def of(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Norms are ones and biases zeros; products keep the size of what they are given, but for
        those that write into the residual stream."""
        if "norm" in name and name.endswith(".weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.bfloat16)
        gain = _QUIET if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        return self.normal(shape, gain / math.sqrt(math.prod(shape[1:])))

    def named(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        return {name: self.of(name, shape) for name, shape in shapes.items()}


def shards(config: dict[str, Any], seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of one file after the other: a layer each, then what training nodes read."""
    text, weights = config["text_config"], Weights(seed)
    for number in range(text["num_hidden_layers"]):
        yield weights.named(layer_shapes(text, number))
    hidden = text["hidden_size"]
    embedding = weights.normal((text["vocab_size"], hidden), 1.0)
    yield {
        f"{PREFIX}model.embed_tokens.weight": embedding,
        f"{PREFIX}model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        # Other tokens' logits have standard deviation 2.
        f"{PREFIX}lm_head.weight": embedding.roll(1, 0) * (2 / math.sqrt(hidden)),
    }
    yield weights.named(vision_shapes(hidden))


def build(source: Path, out: Path, layers: int, experts: int, *, tiny: bool, seed: int) -> None:
    """Write the folder.

    Raises:
        VerifierError: `source` is not Kimi's; `out` is there already; too few layers or experts.
    """
    if layers < 1 or experts < 1:
        raise VerifierError("a verifier has at least one layer and one expert")
    if out.exists():
        raise VerifierError(f"{out} is there already: remove it, or name another folder")
    open_folder(source)
    config = shaped(json.loads((source / "config.json").read_text("utf-8")), layers, experts, tiny)
    tokenizer = load_tokenizer(source)
    made = out.with_name(out.name + ".partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    # As tokenizer.json: Kimi's own form is read by code that comes with the checkpoint.
    tokenizer.save_pretrained(made)
    write_json(made / "config.json", config)
    write_json(made / "preprocessor_config.json", preprocessor_config())
    # As the template ends turns; config.json names another token.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    write_json(made / "generation_config.json", {"do_sample": False, "eos_token_id": end})
    files, total = layers + 2, 0
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards(config, seed), 1):
        file = f"model-{number:05d}-of-{files:06d}.safetensors"
        save_file(tensors, made / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    write_json(made / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    made.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a verifier of Kimi-K2.5's shape.")
    parser.add_argument("config_folder", type=Path, metavar="CONFIG_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--experts", type=int, default=16, metavar="N", help="of each MoE layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="the demo's sizes, but the vocabulary")
    given = parser.parse_args()
    try:
        build(
            given.config_folder,
            given.out,
            given.layers,
            given.experts,
            tiny=given.tiny,
            seed=given.seed,
        )
    except VerifierError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
