"""Muon's orthogonalization: torch's, closer to the exact iteration, and by half on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
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


KERNEL = """
import torch
from kimi_eagle.draft import symmetric_kernel as kernel
torch.manual_seed(0)
assert kernel.fits(512, 192) and not kernel.fits(500, 192) and not kernel.fits(512, 100)
for size, inner, turned in ((256, 64, False), (768, 128, False), (512, 192, True)):
    x = torch.randn(inner, size).half().T / 8 if turned else torch.randn(size, inner).half() / 8
    added = torch.randn(size, size).half()
    added = (added + added.T).contiguous()
    options = dict(alpha=0.5, beta=0.25, added=added, diagonal=3.0)
    found = kernel.product(x, x, **options)
    wanted = 0.5 * (x.float() @ x.float().T) + 0.25 * added.float() + 3 * torch.eye(size)
    torch.testing.assert_close(found.float(), wanted, atol=0.003, rtol=0.001)
    assert torch.equal(found, found.T)
    bare = kernel.product(x, x, alpha=1.0, beta=0.0, added=None, diagonal=0.0)
    torch.testing.assert_close(bare.float(), x.float() @ x.float().T, atol=0.003, rtol=0.001)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_of_half_a_product() -> None:
    """Run by triton's interpreter, as there is no GPU here."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNEL], env=environment, check=True, timeout=120)
