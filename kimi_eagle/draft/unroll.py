"""The draft unrolled over TTT steps: from a batch to the states that its head reads. Imports torch.

It computes what speculators' `Eagle3DraftModel.forward` computes, on that model's parameters, and
leaves out what that does more than once:

- Tokens are forced, so step k's embeddings are step 0's, k positions on: their share of the first
  layer's queries, keys and values is computed once and shifted, which saves half of those products
  in every further step. (The last k positions get zeros; nothing with a loss reads them.)
- No step's logits are needed for the next step: heads and losses come after (see `losses`).
- Parameters are turned into the type of the products once a batch, and the gradients of all steps
  are added up in the products that give them (see `products`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from kimi_eagle.draft.attention import Attention, Dense, Eager, Flex
from kimi_eagle.draft.batches import PackedBatch
from kimi_eagle.draft.kernels import Kernels
from kimi_eagle.draft.products import Weight


class Unroll:
    """The forward pass of a draft model over its trunk."""

    def __init__(self, model: Any, *, steps: int, attention: str, dtype: Any, kernels: Kernels):
        """Args: `attention`: flex, sdpa or eager; `dtype`: of the products."""
        config = model.config
        assert model.input_norm is None, "not part of what is unrolled here"
        assert model.fc_norm is None, "not part of what is unrolled here"
        assert not config.norm_output, "not part of what is unrolled here"
        self._model = model
        self._steps = steps
        self._attention = attention
        self._dtype = dtype
        self._kernels = kernels
        self._before_residual = bool(config.norm_before_residual)
        decoder = config.transformer_layer_config
        self._head_dim = int(decoder.head_dim)
        self._windows = [
            decoder.sliding_window if index in model.sliding_window_indices else None
            for index in range(len(model.layers))
        ]

    def __call__(self, batch: PackedBatch) -> list[Any]:
        """The normed states of each TTT step, [positions, hidden] in the type of the products:
        what the head takes."""
        model, dtype, kernels = self._model, self._dtype, self._kernels
        with torch.no_grad():
            embeds = model.embed_tokens(batch.input_ids)
        hidden = Weight(model.fc.weight, dtype)(batch.hidden_states.to(dtype)).float()
        layers = [
            _Layer(layer, index == 0, self._head_dim, self._before_residual, dtype, kernels)
            for index, layer in enumerate(model.layers)
        ]
        # Zeros beyond the last position, so that every step finds its own by a shift.
        layers[0].embed(pad(embeds, (0, 0, 0, self._steps - 1)))
        attend = {window: self._attend(batch, window) for window in set(self._windows)}
        found = []
        for step in range(self._steps):
            positions = (batch.position_ids + step).unsqueeze(0)
            cos, sin = (item.squeeze(0) for item in model.rotary_emb(hidden, positions))
            added = None
            for layer, window in zip(layers, self._windows, strict=True):
                hidden = hidden if added is None else hidden + added
                hidden, added = layer(hidden, step, cos, sin, attend[window])
            norm = model.norm
            hidden, normed = kernels.add_and_norm(
                hidden, added, norm.weight, norm.variance_epsilon, dtype
            )
            found.append(normed)
        return found

    def _attend(self, batch: PackedBatch, window: int | None) -> Attention:
        if self._attention == "flex":
            return Flex(batch.document_ids, window, self._kernels)
        if self._attention == "sdpa":
            return Dense(batch.document_ids, self._steps, window)
        device = batch.document_ids.device
        return Eager(batch.lengths, len(batch.document_ids), window, device)


class _Layer:
    """One decoder layer over one batch, and the keys and values of its steps so far."""

    def __init__(
        self,
        layer: Any,
        first: bool,
        head_dim: int,
        before_residual: bool,
        dtype: Any,
        kernels: Kernels,
    ):
        self._layer = layer
        self._first = first
        self._head_dim = head_dim
        self._before_residual = before_residual
        self._dtype = dtype
        self._kernels = kernels
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._shares: list[Any] = []
        attention, mlp = layer.self_attn, layer.mlp
        inward = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._projections = [Weight(part.weight, dtype) for part in inward]
        self._out = Weight(attention.o_proj.weight, dtype)
        self._gate = Weight(mlp.gate_proj.weight, dtype)
        self._up = Weight(mlp.up_proj.weight, dtype)
        self._down = Weight(mlp.down_proj.weight, dtype)
        # Of the first layer: the half for embeddings, and that for states.
        half = self._projections[0].columns // 2
        self._of_embeds, self._of_states = slice(half), slice(half, None)

    def embed(self, embeds: Any) -> None:
        """Take the embeddings of step 0, with zeros for those beyond the end of later steps
        [positions + steps - 1, hidden], and compute their share of queries, keys and values."""
        normed = self._norm(embeds, self._layer.input_layernorm)
        self._shares = [weight(normed, part=self._of_embeds) for weight in self._projections]

    def __call__(
        self, hidden: Any, step: int, cos: Any, sin: Any, attend: Attention
    ) -> tuple[Any, Any]:
        """The layer at a TTT step: the two terms of its output, [positions, hidden] each; the
        first of them, as `hidden`, fp32."""
        layer = self._layer
        residual = hidden
        if self._first:
            normed = self._norm(hidden, layer.hidden_norm)
            if self._before_residual:
                residual = normed.float()
            own = slice(step, step + len(hidden))
            parts = [
                weight(normed, share[own], self._of_states)
                for share, weight in zip(self._shares, self._projections, strict=True)
            ]
        else:
            normed = self._norm(hidden, layer.input_layernorm)
            parts = [weight(normed) for weight in self._projections]
        query, key, value = (
            part.view(len(hidden), -1, self._head_dim).transpose(0, 1) for part in parts
        )
        query = self._kernels.rotate(query, cos, sin)
        self._keys.append(self._kernels.rotate(key, cos, sin))
        self._values.append(value)
        out = attend(query, self._keys, self._values, layer.self_attn.scaling)
        out = out.transpose(0, 1).reshape(len(hidden), -1)
        norm = layer.post_attention_layernorm
        hidden, normed = self._kernels.add_and_norm(
            residual, self._out(out), norm.weight, norm.variance_epsilon, self._dtype
        )
        return hidden, self._down(self._kernels.gated(self._gate(normed), self._up(normed)))

    def _norm(self, x: Any, norm: Any) -> Any:
        return self._kernels.rms_norm(x, norm.weight, norm.variance_epsilon, self._dtype)
