"""The facts of a verifier, read from its config.json. Pure.

`KimiK25ForConditionalGeneration` keeps every number in `text_config` and every language tensor
under `language_model.`; the families after it are flat. Whatever is not known here is refused
with what is, rather than guessed by the suffix of a name: a multi-token-prediction layer has an
embedding of its own, and layer 0 has a norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class VerifierError(ValueError):
    """The verifier's folder is not what it must be; the message says what to do."""


class UnknownArchitecture(VerifierError):
    """A model_type that no family is known for."""


@dataclass(frozen=True)
class Family:
    """Where one architecture keeps its text config and its tensors."""

    nested: str | None
    prefix: str


FAMILIES: dict[str, Family] = {
    "kimi_k25": Family(nested="text_config", prefix="language_model."),
    "kimi_k2": Family(nested=None, prefix=""),
    "deepseek_v3": Family(nested=None, prefix=""),
    "llama": Family(nested=None, prefix=""),
    "mistral": Family(nested=None, prefix=""),
    "qwen2": Family(nested=None, prefix=""),
    "qwen3": Family(nested=None, prefix=""),
    "qwen3_moe": Family(nested=None, prefix=""),
}


@dataclass(frozen=True)
class VerifierFacts:
    """What stages need to know of a verifier; sizes in elements."""

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """transformers' `rope_parameters`: `rope_type`, `rope_theta` and the scaling."""
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    prefix: str
    text_config: dict[str, Any]

    @property
    def mla(self) -> bool:
        """Whether it caches a latent of each token, instead of keys and values by head."""
        return self.text_config.get("kv_lora_rank") is not None

    @property
    def embed_tokens(self) -> str:
        return f"{self.prefix}model.embed_tokens.weight"

    @property
    def norm(self) -> str:
        return f"{self.prefix}model.norm.weight"

    @property
    def lm_head(self) -> str:
        return f"{self.prefix}lm_head.weight"

    def aux_layers(self, layers: tuple[int, ...] | Literal["default"]) -> tuple[int, ...]:
        """The aux layer ids, counting the input embeddings as 0.

        The default, [2, n // 2, n - 3] for n layers, is that of EAGLE-3's authors; for Kimi-K2.5
        it gives [2, 30, 58].

        Raises:
            VerifierError: no id, or ids that repeat, go down, or lie outside 0..n-1. The last
                layer's output (id n) is not an aux layer: it is always taken besides them.
        """
        n = self.num_layers
        ids = (2, n // 2, n - 3) if layers == "default" else tuple(layers)
        inside = all(0 <= layer < n for layer in ids)
        if not ids or not inside or list(ids) != sorted(set(ids)):
            origin = "the default aux layers" if layers == "default" else "aux layers"
            raise VerifierError(
                f"{origin} {list(ids)} do not fit a verifier of {n} layers: they must be distinct, "
                f"ascending and within 0..{n - 1} (the input embeddings are 0; the last layer is "
                "taken besides them); name them in `layers`"
            )
        return ids


def read_facts(config: Mapping[str, Any]) -> VerifierFacts:
    """The facts in a verifier's config.json.

    Raises:
        VerifierError: an unknown architecture, or a number that is missing or no number.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnknownArchitecture(
            f"config.json: model_type {model_type!r} is not known; known are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    text = config
    where = "config.json"
    if family.nested is not None:
        nested = config.get(family.nested)
        if not isinstance(nested, Mapping):
            raise VerifierError(
                f"config.json: {model_type} keeps its numbers in `{family.nested}`, "
                "which is missing"
            )
        text, where = nested, f"config.json: {family.nested}"

    def number(name: str, default: int | None = None) -> int:
        value = text.get(name, default)
        if type(value) is not int or value < 1:
            raise VerifierError(f"{where}.{name} must be a positive whole number, found {value!r}")
        return value

    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    own = "v_head_dim" if text.get("v_head_dim") is not None else "head_dim"
    head_dim = number(own) if text.get(own) is not None else hidden // heads
    max_positions = number("max_position_embeddings", 2048)
    return VerifierFacts(
        model_type=str(model_type),
        hidden_size=hidden,
        num_layers=number("num_hidden_layers"),
        vocab_size=number("vocab_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=number("intermediate_size", 3 * hidden),
        max_positions=max_positions,
        rms_norm_eps=_real(text.get("rms_norm_eps", 1e-6), f"{where}.rms_norm_eps"),
        rope=_rope(text, max_positions, where),
        tied_embeddings=bool(
            text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        ),
        bos_token_id=_token(text, config, "bos_token_id"),
        eos_token_id=_token(text, config, "eos_token_id"),
        pad_token_id=_token(text, config, "pad_token_id"),
        prefix=family.prefix,
        text_config=dict(text),
    )


def _token(text: Mapping[str, Any], config: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name, config.get(name))
    if isinstance(value, list):
        value = value[0] if value else None
    return value if type(value) is int else None


def _real(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise VerifierError(f"{where} must be a positive number, found {value!r}")
    return float(value)


def _rope(text: Mapping[str, Any], max_positions: int, where: str) -> dict[str, Any]:
    """`rope_parameters` in the form of transformers 5, from it or from the older pair of keys.

    Where both are there the older `rope_scaling` counts, as in transformers. The theta is looked
    for in all three places; 10000, the default of every family here, only where none has it.
    """
    newer, older = text.get("rope_parameters"), text.get("rope_scaling")
    for name, given in (("rope_parameters", newer), ("rope_scaling", older)):
        if given is not None and not isinstance(given, Mapping):
            raise VerifierError(f"{where}.{name} must be an object, found {given!r}")
        if any(isinstance(item, Mapping) for item in (given or {}).values()):
            raise VerifierError(f"{where}.{name} differs by layer type, which no draft here can")
    rope = dict(older or newer or {})
    for source in (text, newer or {}, {"rope_theta": 10000.0}):
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = source.get("rope_theta")
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", max_positions)
    rope["rope_theta"] = _real(rope["rope_theta"], f"{where}: rope_theta")
    return rope
