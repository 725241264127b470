"""Products with one parameter, used often: what autograd would give, computed in the products."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from kimi_eagle.draft.products import Weight


def inputs() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    parameter, first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((6, 8), (5, 4), (5, 8))
    )
    return parameter, first, second


def test_gradients_are_those_of_autograd() -> None:
    found = []
    for own in (True, False):
        parameter, half, whole = inputs()
        weight: Any = Weight(parameter, parameter.dtype)
        if not own:

            def weight(
                x: Any, added: Any = None, part: slice = slice(None), parameter: Any = parameter
            ) -> Any:
                y = x @ parameter[:, part].T
                return y if added is None else added + y

        a = weight(half, part=slice(4))
        b = weight(half.sin(), a, part=slice(4, None))
        c = weight(whole, b.cos())
        d = weight(whole * 2)
        (c * d).sum().backward()
        found.append((parameter.grad, half.grad, whole.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_use_that_reaches_no_loss_adds_nothing() -> None:
    parameter, _, whole = inputs()
    weight = Weight(parameter, torch.float32)
    weight(whole.float())
    weight(whole.float()).sum().backward()
    expected = whole.detach().float().sum(0).expand(6, 8).double()
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5)


def test_the_weight_goes_with_its_batch() -> None:
    """Without waiting for the collector of cycles: it is as large as the draft."""
    parameter, _, whole = inputs()
    gc.disable()
    try:
        weight = Weight(parameter, torch.float32)
        gone = weakref.ref(weight._value)
        loss = weight(whole.float()).sum()
        loss.backward()
        del weight, loss
        assert gone() is None
    finally:
        gc.enable()
