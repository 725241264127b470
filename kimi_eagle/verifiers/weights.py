"""What a verifier's weights take, by its config.json alone. Pure.

Kimi-K2.5: 384 experts of 60 layers in 4 bits with a bf16 scale for each group of 32, the rest in
bf16: 594 GB (its 64 files hold 595 GB, a vision tower of 0.9 GB among them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_eagle.verifiers.facts import VerifierFacts

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SCALE_BITS = 16
_EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


def weight_bytes(facts: VerifierFacts, config: Mapping[str, Any]) -> int | None:
    """Bytes of the language model's weights, within some per cent; None where the config does not
    say how they are stored.

    Args: `config`: the whole config.json.
    """
    text = facts.text_config
    plain = _BYTES.get(str(text.get("dtype") or text.get("torch_dtype") or _own_dtype(config)))
    quantized = text.get("quantization_config") or config.get("quantization_config")
    stored = _bits_of(quantized) if quantized else None
    if plain is None or (quantized and stored is None):
        return None
    ignored = list(
        (quantized or {}).get("ignore") or (quantized or {}).get("modules_to_not_convert") or ()
    )
    total = 0.0
    for name, count in _matrices(facts):
        kept = (
            stored is None or "embed" in name or name.endswith("mlp.gate") or _among(name, ignored)
        )
        total += count * (plain * 8 if kept or stored is None else stored) / 8
    return round(total)


def _own_dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype")


def _bits_of(quantized: Mapping[str, Any]) -> float | None:
    """Bits that a quantized weight takes with its share of the scale of its group."""
    if quantized.get("quant_method") == "fp8":
        return 8.0
    groups = quantized.get("config_groups")
    if quantized.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping):
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    if len(weights) != 1 or not isinstance(weights[0], Mapping):
        return None
    bits, size = weights[0].get("num_bits"), weights[0].get("group_size")
    if type(bits) is not int:
        return None
    return bits + (_SCALE_BITS / size if type(size) is int and size > 0 else 0)


def _among(name: str, ignored: list[Any]) -> bool:
    """As compressed-tensors reads `ignore`: `re:` and an expression, or a name."""
    return any(
        re.match(item[3:], name) if str(item).startswith("re:") else item == name
        for item in map(str, ignored)
    )


def _matrices(facts: VerifierFacts) -> Iterator[tuple[str, int]]:
    """(name, elements) of the matrices; those of alike layers and of experts together, under the
    name of the first. Norms and biases are thousandths of a per cent."""
    text, hidden, layers = facts.text_config, facts.hidden_size, facts.num_layers
    yield "model.embed_tokens", facts.vocab_size * hidden
    if not facts.tied_embeddings:
        yield "lm_head", facts.vocab_size * hidden
    for name, count in _attention(facts):
        yield f"model.layers.0.self_attn.{name}", count * layers
    experts = _number(text, "n_routed_experts", "num_experts", "num_local_experts")
    dense = layers
    if experts:
        dense = min(layers, _number(text, "first_k_dense_replace"))
        width = _number(text, "moe_intermediate_size") or facts.intermediate_size
        one, sparse = 3 * hidden * width, layers - dense
        yield _EXPERT, one * experts * sparse
        shared = one * _number(text, "n_shared_experts") * sparse
        yield "model.layers.1.mlp.shared_experts.gate_proj", shared
        yield "model.layers.1.mlp.gate", hidden * experts * sparse
    yield "model.layers.0.mlp.gate_proj", 3 * hidden * facts.intermediate_size * dense


def _attention(facts: VerifierFacts) -> Iterator[tuple[str, int]]:
    text, hidden, heads = facts.text_config, facts.hidden_size, facts.num_heads
    compressed = _number(text, "kv_lora_rank")
    if not compressed:
        yield "q_proj", hidden * heads * facts.head_dim
        yield "k_proj", 2 * hidden * facts.num_kv_heads * facts.head_dim
        yield "o_proj", heads * facts.head_dim * hidden
        return
    rotary, value = _number(text, "qk_rope_head_dim"), _number(text, "v_head_dim")
    key = _number(text, "qk_nope_head_dim") + rotary
    rank = _number(text, "q_lora_rank")
    yield "q_b_proj", rank * (hidden + heads * key) if rank else hidden * heads * key
    yield "kv_a_proj_with_mqa", hidden * (compressed + rotary)
    yield "kv_b_proj", compressed * heads * (key - rotary + value)
    yield "o_proj", heads * value * hidden


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The first of these that is there; 0 when none is."""
    return next((text[name] for name in names if type(text.get(name)) is int), 0)
