"""Muon's orthogonalization: torch's, closer to the exact iteration, and by half on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kimi_eagle.draft.muon import SCALE, orthogonal

A, B, C = 3.4445, -4.7750, 2.0315
SHAPES = ((48, 80), (80, 48), (64, 64))


def exact(matrix: Any, steps: int) -> Any:
    """Newton-Schulz as it is defined, in fp64."""
    x = matrix.double() / matrix.double().norm()
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def ours(matrix: Any, steps: int, dtype: Any = torch.float32) -> Any:
    x = (matrix * (SCALE / matrix.norm())).to(dtype)
    return orthogonal(x, steps, compiled=False).float() / SCALE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_it_is_newton_schulz(shape: tuple[int, int], steps: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        ours(matrix, steps).double(), exact(matrix, steps), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torchs_and_closer_to_the_exact_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (A, B, C), 5, 1e-7).float()
    # As on a GPU. What is nearly singular is what both types get wrong.
    mine, true = ours(matrix, 5, torch.float16), exact(matrix, 5).float()
    torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0.02)
    assert (mine - true).norm() < (theirs - true).norm()
