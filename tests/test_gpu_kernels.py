"""Our triton kernels, run by triton's interpreter, as a GPU is not everybody's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SYMMETRIC = """
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
    bare = kernel.product(x, x, alpha=1.0, beta=0.0, added=None, diagonal=0.0)
    torch.testing.assert_close(bare.float(), x.float() @ x.float().T, atol=0.003, rtol=0.001)
    # Symmetric to the bit, of numbers whose sums are exact: here numpy's BLAS adds, and on some
    # processors in another order for one half of a tile on the diagonal than for the other.
    whole = torch.randint(-4, 5, tuple(x.shape)) / 8
    x = (whole.T.contiguous().half().T if turned else whole.half())
    options["added"] = (added * 8).round() / 8
    found = kernel.product(x, x, **options)
    wanted = 0.5 * (x.float() @ x.float().T) + 0.25 * options["added"].float()
    wanted += 3 * torch.eye(size)
    assert torch.equal(found, found.T)
    assert torch.equal(found, wanted.half())
"""

KL = """
import torch
from kimi_eagle.draft.kernels import kl_and_gradient
from kimi_eagle.draft.kl_kernel import kl
torch.manual_seed(0)
for vocab, dtype, tolerance in ((5000, torch.float32, 1e-6), (9000, torch.bfloat16, 4e-3)):
    logits, targets = torch.randn(5, vocab).mul(4), torch.randn(3, vocab).mul(4)
    # Far apart, as a target's share of 0 is; and a tie, of which the first is the likeliest.
    targets[0, 7] = 300.0
    logits[1, 4095] = logits[1, 4096] = logits[1].max() + 1
    logits, targets = logits.to(dtype), targets.to(dtype)
    numbers, weight = torch.tensor([2, 0, 1, 1, 0]), torch.tensor(0.25)
    loss, gradient, tokens = kl(logits, targets, numbers, weight)
    wanted, slope, likeliest = kl_and_gradient(logits, targets, numbers, weight)
    torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradient, slope, atol=tolerance * 0.25, rtol=tolerance)
    assert gradient.dtype == dtype and torch.equal(tokens, likeliest)
    assert tokens[1] == 4095
logits[0, 5] = float("nan")
assert not kl(logits, targets, numbers, weight)[0][0].isfinite()
assert len(kl(logits[:0], targets, numbers[:0], weight)[0]) == 0
"""


@pytest.mark.parametrize("program", [SYMMETRIC, KL], ids=["symmetric", "kl"])
def test_it_computes_what_torch_does(program: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
