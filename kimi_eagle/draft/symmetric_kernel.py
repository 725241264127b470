"""A product that is known to be symmetric, by half, on a GPU. Imports torch and triton.

Only the tiles on and above the diagonal are computed; each is stored where it belongs and mirrored.
Half a product that is cut into strips for a BLAS fills the GPU badly and has to be copied after.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Of the result; the second is a multiple of the first. And how far in one step.
_ROWS, _COLUMNS, _INNER = 128, 256, 64
# Columns of tiles that are worked on together, so that what they share stays in the cache.
_TOGETHER = 12


def fits(size: int, inner: int) -> bool:
    """Whether the kernel takes a product of [size, inner] by [inner, size]."""
    return size % _COLUMNS == 0 and inner % _INNER == 0 and size * max(size, inner) < 1 << 31


def product(
    left: Any, right: Any, *, alpha: float, beta: float, added: Any, diagonal: float
) -> Any:
    """alpha · left · rightᵀ + beta · added + diagonal · 1, where that is symmetric.

    Args:
        left, right: [size, inner] of one 16-bit type, in any order of memory.
        added: [size, size] contiguous; None for nothing.
    """
    size, inner = left.shape
    found = torch.empty(size, size, dtype=left.dtype, device=left.device)
    order = _order(size, left.device)
    _kernel[(len(order),)](
        left,
        right,
        found if added is None else added,
        found,
        order,
        size,
        inner,
        *left.stride(),
        *right.stride(),
        alpha,
        beta,
        diagonal,
        WITH_ADDED=added is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        num_warps=8,
        num_stages=3,
    )
    return found


@cache
def _order(size: int, device: Any) -> Any:
    """int32 [tiles, 2]: row and column of every tile that is computed, in the order of work."""
    ratio, across = _COLUMNS // _ROWS, size // _COLUMNS
    tiles = [
        (row, column)
        for first in range(0, across, _TOGETHER)
        for row in range(ratio * min(first + _TOGETHER, across))
        for column in range(first, min(first + _TOGETHER, across))
        if row // ratio <= column
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    left,
    right,
    added,
    found,
    order,
    size,
    inner,
    left_row,
    left_column,
    right_row,
    right_column,
    alpha,
    beta,
    diagonal,
    WITH_ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    tile = order + 2 * tl.program_id(0)
    row, column = tl.load(tile), tl.load(tile + 1)
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, INNER)
    a = left + rows[:, None] * left_row + step[None, :] * left_column
    b = right + columns[None, :] * right_row + step[:, None] * right_column
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, inner, INNER):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += INNER * left_column
        b += INNER * right_column
    total *= alpha
    at = rows[:, None] * size + columns[None, :]
    if WITH_ADDED:
        total += beta * tl.load(added + at).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    value = total.to(found.dtype.element_ty)
    tl.store(found + at, value)
    if row * ROWS // COLUMNS != column:
        mirrored = columns[:, None] * size + rows[None, :]
        tl.store(found + mirrored, tl.trans(value))
