"""Attention of the unrolled draft over packed rows. Imports torch.

At TTT step k a position attends to the keys of step 0 of its own row up to itself, and to its own
keys of the steps 1 to k. All implementations say the same:

- `dense`: torch's attention over all keys under a mask [positions, (k + 1) · positions];
- `eager`: row by row, the own keys as k further columns of the softmax: what many short rows in a
  batch want, and a CPU;
- `flex`: flex attention over the keys of step 0, and the own keys added to its softmax after (see
  `kernels.with_diagonals`): no mask grows, and no key is kept twice.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad, scaled_dot_product_attention

from kimi_eagle.draft.kernels import Kernels


class Attention(Protocol):
    """What a batch's positions attend to."""

    def __call__(self, query: Any, keys: list[Any], values: list[Any], scale: float) -> Any:
        """[heads, positions, dim]; keys and values of each TTT step so far, [kv heads, …]."""
        ...


def attends(document_ids: Any, window: int | None) -> Any:
    """bool [positions, positions]: whether a query attends to a key of step 0."""
    at = torch.arange(len(document_ids), device=document_ids.device)
    query, key = at.unsqueeze(1), at.unsqueeze(0)
    allowed = (query >= key) & (document_ids.unsqueeze(1) == document_ids.unsqueeze(0))
    if window is not None:
        allowed &= key > query - window
    # Padding sees itself, so that no row of the softmax is empty.
    return (allowed & (document_ids != -1).unsqueeze(1)) | (query == key)


class Dense:
    """torch's attention under a dense mask."""

    def __init__(self, document_ids: Any, steps: int, window: int | None):
        first = attends(document_ids, window)
        own = torch.eye(len(document_ids), dtype=torch.bool, device=document_ids.device)
        self._mask = torch.cat([first, *[own] * (steps - 1)], dim=1)

    def __call__(self, query: Any, keys: list[Any], values: list[Any], scale: float) -> Any:
        groups = query.shape[0] // keys[0].shape[0]
        key = torch.cat(keys, dim=1).repeat_interleave(groups, 0)
        value = torch.cat(values, dim=1).repeat_interleave(groups, 0)
        mask = self._mask[:, : key.shape[1]]
        batch = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
        return scaled_dot_product_attention(*batch, attn_mask=mask, scale=scale).squeeze(0)


class Eager:
    """Row by row, scores in fp32."""

    def __init__(self, lengths: tuple[int, ...], width: int, window: int | None, device: Any):
        """Args: `lengths`: positions of each row; `width`: of the batch with its padding."""
        self._lengths = lengths
        self._left = width - sum(lengths)
        self._longest = max(lengths)
        at = torch.arange(self._longest, device=device)
        query, key = at.unsqueeze(1), at.unsqueeze(0)
        self._hidden = query < key
        if window is not None:
            self._hidden = self._hidden | (key <= query - window)
        self._known: dict[int, Any] = {}

    def __call__(self, query: Any, keys: list[Any], values: list[Any], scale: float) -> Any:
        groups = query.shape[0] // keys[0].shape[0]
        q = self._by_row(query).float() * scale
        k, *own_keys = (self._once(item, groups) for item in keys)
        v, *own_values = (self._once(item, groups) for item in values)
        scores = (q @ k.float().transpose(-1, -2)).masked_fill(self._hidden, float("-inf"))
        own = [(q * item.float()).sum(-1, keepdim=True) for item in own_keys]
        shares = torch.cat([scores, *own], dim=-1).softmax(-1).to(v.dtype)
        out = shares[..., : self._longest] @ v
        for number, value in enumerate(own_values, self._longest):
            out = out + shares[..., number : number + 1] * value
        return self._packed(out)

    def _once(self, item: Any, groups: int) -> Any:
        """Keys and values come again at every later step."""
        if id(item) not in self._known:
            self._known[id(item)] = self._by_row(item).repeat_interleave(groups, 1)
        return self._known[id(item)]

    def _by_row(self, item: Any) -> Any:
        """[heads, positions, dim] → [rows, heads, longest, dim]; what a row lacks is zero, and
        comes after every position that could see it."""
        parts = item.split([*self._lengths, self._left], dim=1)[:-1]
        return torch.stack([pad(part, (0, 0, 0, self._longest - part.shape[1])) for part in parts])

    def _packed(self, item: Any) -> Any:
        """The way back; padding gets zeros."""
        parts = [item[row, :, :length] for row, length in enumerate(self._lengths)]
        return pad(torch.cat(parts, dim=1), (0, 0, 0, self._left))


class Flex:
    """Flex attention; on a GPU compiled, which it is meant to be."""

    def __init__(self, document_ids: Any, window: int | None, kernels: Kernels):
        def allowed(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            seen = (query >= key) & (document_ids[query] == document_ids[key])
            if window is not None:
                seen = seen & (key > query - window)
            return (seen & (document_ids[query] != -1)) | (query == key)

        size = len(document_ids)
        self._mask = flex.create_block_mask(allowed, None, None, size, size, document_ids.device)
        self._kernels = kernels

    def __call__(self, query: Any, keys: list[Any], values: list[Any], scale: float) -> Any:
        out, lse = _with_lse(
            self._kernels.compiled,
            query.unsqueeze(0).contiguous(),
            keys[0].unsqueeze(0).contiguous(),
            values[0].unsqueeze(0).contiguous(),
            block_mask=self._mask,
            scale=scale,
            enable_gqa=query.shape[0] != keys[0].shape[0],
        )
        if len(keys) == 1:
            return out.squeeze(0)
        groups = query.shape[0] // keys[0].shape[0]
        return self._kernels.with_diagonals(
            out.squeeze(0),
            lse.squeeze(0),
            query,
            torch.stack(keys[1:]).repeat_interleave(groups, 1),
            torch.stack(values[1:]).repeat_interleave(groups, 1),
            scale,
        )


_MADE: dict[bool, Any] = {}


def _flex(compiled: bool) -> Any:
    """Flex attention, compiled once for all batches: whose mask it is does not matter."""
    if compiled not in _MADE:
        plain = flex.flex_attention
        _MADE[compiled] = torch.compile(plain, dynamic=False) if compiled else plain
    return _MADE[compiled]


def _with_lse(compiled: bool, *given: Any, **options: Any) -> tuple[Any, Any]:
    """Attention, and the log of the sum of its exponentials (asked for otherwise before 2.9)."""
    if hasattr(flex, "AuxRequest"):
        aux = flex.AuxRequest(lse=True)
        out, more = _flex(compiled)(*given, **options, return_aux=aux)
        return out, more.lse
    out, lse = _flex(compiled)(*given, **options, return_lse=True)
    return out, lse
