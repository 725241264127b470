"""The draft's forward pass, in plain torch, as serving runs it. Imports torch.

Written from the layout that is published for EAGLE-3 drafts and held against speculators' own
model in the tests, so that a checkpoint can be run without an engine and without a trainer: to
simulate acceptance, and to prove that an exported folder computes what the checkpoint does.

Position i of the draft sees token i + 1 and the verifier's aux states of token i, and proposes
token i + 2. In a chain, every further token sees the draft's own state and own proposal instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

# Attention weights held at once, in elements: 256 MiB in float32.
_SCORES = 1 << 26


class UnknownDraft(ValueError):
    """A draft that this forward pass cannot run; the message says what it does not know."""


@dataclass(frozen=True)
class DraftConfig:
    """What the forward pass needs of a draft's configuration, whatever file it was read from."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    """transformers' `rope_parameters`: `rope_type`, `rope_theta` and the scaling."""
    aux_layers: tuple[int, ...]
    """Aux layer ids, counting the input embeddings as 0."""
    windows: tuple[int | None, ...]
    """Of each layer, how many tokens it sees; None for all of them."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass
class Chain:
    """What drafting on needs: of each layer the keys and values of the pass over the verifier's
    states, [kv heads, positions, head dim], and those of the chains so far, [kv heads, starts,
    steps, head dim]."""

    keys: list[Any]
    values: list[Any]
    own_keys: list[Any]
    own_values: list[Any]


class Eagle3:
    """A draft that can be run.

    Tensors are named as speculators names them (`layers.0.self_attn.q_proj.weight`); `d2t` holds
    offsets. Arithmetic is that of the tensors' dtype, norms and softmax in float32.
    """

    def __init__(self, config: DraftConfig, tensors: Mapping[str, Any], device: str = "cpu"):
        """Raises: UnknownDraft for a rotary scaling or a tensor that is not known."""
        self.config = config
        self._t = {name: tensor.to(device) for name, tensor in tensors.items()}
        if any(name.endswith(".bias") for name in tensors):
            raise UnknownDraft("the draft has biases, which no EAGLE-3 draft here has")
        inverse, self._attention_scale = rope_frequencies(config.rope, config.head_dim)
        self._inverse = inverse.to(device)
        self.device = device

    def combine(self, aux: Any) -> Any:
        """Aux states [positions, aux · hidden] → what the first layer sees, [positions, hidden]."""
        if self.config.norm_before_fc:
            aux = self._norm(aux, "input_norm.weight")
        if self.config.fc_norm:
            parts = aux.chunk(len(self.config.aux_layers), dim=-1)
            aux = torch.cat(
                [self._norm(part, f"fc_norm.{n}.weight") for n, part in enumerate(parts)], dim=-1
            )
        return F.linear(aux, self._t["fc.weight"])

    def read(self, tokens: Any, hidden: Any) -> tuple[Any, Chain]:
        """Run over the verifier's states.

        Args:
            tokens: int64 [positions], at position i the token *after* the one whose state it is.
            hidden: combined states [positions, hidden].

        Returns: the draft's states [positions, hidden] (see `logits`), and what chains need.
        """
        chain = Chain([], [], [], [])
        cos, sin = self._rotary(torch.arange(len(tokens), device=self.device))
        state = hidden
        for layer in range(self.config.layers):
            query, key, value, residual = self._projected(layer, tokens, state, cos, sin)
            chain.keys.append(key)
            chain.values.append(value)
            mixed = self._causal(query, key, value, self.config.windows[layer])
            state = self._finish(layer, mixed, residual)
        if self.config.norm_output:
            state = self._norm(state, "norm.weight")
        return state, chain

    def draft(self, chain: Chain, starts: Any, step: int, tokens: Any, hidden: Any) -> Any:
        """One further step of many chains.

        Args:
            chain: of `read`; the step's keys and values are added to it.
            starts: int64 [starts], the positions the chains began at, the same at every step.
            step: 1 for the first step after `read`.
            tokens: int64 [starts], what each chain proposed last, as verifier ids.
            hidden: the draft's own states of the step before, [starts, hidden].

        Returns: the draft's states [starts, hidden].
        """
        positions = starts + step
        cos, sin = self._rotary(positions)
        state = hidden
        for layer in range(self.config.layers):
            query, key, value, residual = self._projected(layer, tokens, state, cos, sin)
            if step == 1:
                chain.own_keys.append(key[:, :, None])
                chain.own_values.append(value[:, :, None])
            else:
                chain.own_keys[layer] = torch.cat([chain.own_keys[layer], key[:, :, None]], 2)
                chain.own_values[layer] = torch.cat([chain.own_values[layer], value[:, :, None]], 2)
            mixed = self._chained(layer, query, chain, starts, step)
            state = self._finish(layer, mixed, residual)
        if self.config.norm_output:
            state = self._norm(state, "norm.weight")
        return state

    def logits(self, state: Any) -> Any:
        """Over the draft's vocabulary, [positions, draft vocab]."""
        if not self.config.norm_output:
            state = self._norm(state, "norm.weight")
        return F.linear(state, self._t["lm_head.weight"])

    def proposed(self, state: Any) -> Any:
        """The likeliest token at each position, int64 verifier ids."""
        best = torch.cat([self.logits(part).argmax(-1) for part in state.split(2048)])
        return best + self._t["d2t"][best] if "d2t" in self._t else best

    def _norm(self, x: Any, name: str) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self._t[name] * wide.to(x.dtype)

    def _rotary(self, positions: Any) -> tuple[Any, Any]:
        angles = positions.float()[:, None] * self._inverse
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self._attention_scale, angles.sin() * self._attention_scale

    def _projected(self, layer: int, tokens: Any, state: Any, cos: Any, sin: Any) -> Any:
        """(query [heads, positions, head dim], key, value, residual) of a layer."""
        at = f"layers.{layer}"
        if layer == 0:
            embedded = F.embedding(tokens, self._t["embed_tokens.weight"])
            embedded = self._norm(embedded, f"{at}.input_layernorm.weight")
            normed = self._norm(state, f"{at}.hidden_norm.weight")
            residual = normed if self.config.norm_before_residual else state
            given = torch.cat([embedded, normed], dim=-1)
        else:
            residual = state
            given = self._norm(state, f"{at}.input_layernorm.weight")

        def heads(name: str) -> Any:
            made = F.linear(given, self._t[f"{at}.self_attn.{name}.weight"])
            return made.view(len(given), -1, self.config.head_dim).transpose(0, 1)

        query, key = (_rotated(heads(name), cos, sin) for name in ("q_proj", "k_proj"))
        return query, key, heads("v_proj"), residual

    def _causal(self, query: Any, key: Any, value: Any, window: int | None) -> Any:
        groups = self.config.heads // self.config.kv_heads
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
        if window is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        at = torch.arange(query.shape[1], device=query.device)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    def _chained(self, layer: int, query: Any, chain: Chain, starts: Any, step: int) -> Any:
        """Each chain sees the verifier's positions up to its start, and its own steps."""
        window = self.config.windows[layer]
        keys, values = chain.keys[layer], chain.values[layer]
        length, groups = keys.shape[1], self.config.heads // self.config.kv_heads
        # The largest slice of starts whose scores fit in memory.
        size = max(1, _SCORES // (self.config.heads * max(length, 1)))
        at = torch.arange(length, device=query.device)
        parts = []
        for first in range(0, len(starts), size):
            part = slice(first, first + size)
            begun = starts[part, None]
            q = query[:, part].reshape(self.config.kv_heads, groups, -1, self.config.head_dim)
            shared = torch.einsum("kgsd,kld->kgsl", q, keys).float()
            seen = at[None] <= begun
            if window is not None:
                seen &= at[None] > begun + step - window
            shared = shared.masked_fill(~seen, -math.inf)
            own = torch.einsum("kgsd,kstd->kgst", q, chain.own_keys[layer][:, part]).float()
            if window is not None and window <= step:
                own[..., : step - window] = -math.inf
            weights = torch.cat([shared, own], dim=-1) / math.sqrt(self.config.head_dim)
            weights = weights.softmax(-1).to(values.dtype)
            mixed = torch.einsum("kgsl,kld->kgsd", weights[..., :length], values)
            mixed = mixed + torch.einsum(
                "kgst,kstd->kgsd", weights[..., length:], chain.own_values[layer][:, part]
            )
            parts.append(mixed.reshape(self.config.heads, -1, self.config.head_dim))
        return torch.cat(parts, dim=1)

    def _finish(self, layer: int, mixed: Any, residual: Any) -> Any:
        at = f"layers.{layer}"
        flat = mixed.transpose(0, 1).reshape(mixed.shape[1], -1)
        state = residual + F.linear(flat, self._t[f"{at}.self_attn.o_proj.weight"])
        x = self._norm(state, f"{at}.post_attention_layernorm.weight")
        gate = F.silu(F.linear(x, self._t[f"{at}.mlp.gate_proj.weight"]))
        up = F.linear(x, self._t[f"{at}.mlp.up_proj.weight"])
        return state + F.linear(gate * up, self._t[f"{at}.mlp.down_proj.weight"])


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of x [heads, positions, head dim], halves rotated as in NeoX and Llama."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def rope_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Any, float]:
    """(inverse frequencies float32 [head dim / 2], what cos and sin are multiplied by).

    `default`, `linear`, `llama3` (Llama 3.1's) and `yarn` (Peng et al., arXiv:2309.00071), as
    transformers and vLLM both compute them.

    Raises: UnknownDraft for any other kind.
    """
    theta, kind = float(rope["rope_theta"]), rope.get("rope_type", "default")
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if kind == "default":
        return plain, 1.0
    factor = float(rope.get("factor", 1.0))
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(plain, rope, factor), 1.0
    if kind != "yarn":
        raise UnknownDraft(f"rotary scaling of kind {kind} is not known here")
    original = float(rope["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        m, whole = rope.get("mscale"), rope.get("mscale_all_dim")
        both = bool(m and whole)
        scale = _mscale(factor, m) / _mscale(factor, whole) if both else _mscale(factor, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), float(scale)


def _mscale(factor: float, weight: Any) -> float:
    return 0.1 * float(weight) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: Any, rope: Mapping[str, Any], factor: float) -> Any:
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain
