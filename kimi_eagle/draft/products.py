"""Products with a parameter that is used more than once in a batch. Imports torch.

Autograd adds the gradients of such uses up in passes over memory of their own. Here each use adds
its gradient where it is computed, in the product itself; what is used in parts is never put
together from the gradients of its parts.
"""

from __future__ import annotations

from typing import Any

import torch


class Weight:
    """A parameter [out, in] in the type of the products, for one batch."""

    def __init__(self, parameter: Any, dtype: Any):
        self._value = parameter.detach().to(dtype)
        self._sum = _Sum(self._value)
        # What ties the products to the parameter in autograd's graph: it carries no numbers.
        self._link = _Link.apply(parameter, self._sum)

    def __call__(self, x: Any, added: Any = None, part: slice = slice(None)) -> Any:
        """x · weightᵀ, plus `added`: [positions, out].

        Args:
            x: [positions, in of the part].
            part: of the weight's columns.
        """
        return _Product.apply(x, self._link, added, self._value[:, part], self._sum, part)

    @property
    def columns(self) -> int:
        return int(self._value.shape[1])


class _Sum:
    """The gradient of a weight, so far."""

    def __init__(self, weight: Any):
        self._shape = weight.shape
        self.value: Any = None

    def add(self, out: Any, x: Any, part: slice) -> None:
        """Add outᵀ · x to a part."""
        if self.value is None and x.shape[1] == self._shape[1]:
            self.value = torch.mm(out.T, x)
            return
        if self.value is None:
            self.value = x.new_zeros(self._shape)
        self.value[:, part].addmm_(out.T, x)


class _Link(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, parameter: Any, total: _Sum) -> Any:
        context.total, context.dtype = total, parameter.dtype
        context.set_materialize_grads(False)
        return parameter.new_empty(0)

    @staticmethod
    def backward(context: Any, _: Any) -> tuple[Any, ...]:
        """After all products: none gives this a gradient, each adds to the sum."""
        found, context.total.value = context.total.value, None
        return (None if found is None else found.to(context.dtype)), None


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Any, x: Any, link: Any, added: Any, weight: Any, total: _Sum, part: slice
    ) -> Any:
        context.save_for_backward(x)
        context.weight, context.total, context.part = weight, total, part
        return x @ weight.T if added is None else torch.addmm(added, x, weight.T)

    @staticmethod
    def backward(context: Any, out: Any) -> tuple[Any, ...]:
        (x,) = context.saved_tensors
        wanted = context.needs_input_grad
        if wanted[1]:
            context.total.add(out, x, context.part)
        of_x = out @ context.weight if wanted[0] else None
        return of_x, None, out if wanted[2] else None, None, None, None
