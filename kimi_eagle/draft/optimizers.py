"""AdamW and Muon with state that can be saved whole. Imports torch.

AdamW is torch's. Muon is torch's `Muon` with `match_rms_adamw` (Jordan et al. 2024, Liu et al.
2025), with the products that are symmetric computed by half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

# speculators' rule for what is no matrix to Muon.
_ADAMW_NAMES = ("embed_tokens", "lm_head")
# torch's coefficients of the Newton-Schulz iteration.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
# Below this many rows half a product costs more launches than it saves work.
_SYMMETRIC_FROM = 2048
_STRIPS = 4


class Optimizer:
    """The optimizers of a draft, as one."""

    def __init__(self, parameters: Mapping[str, Any], params: Any):
        """Args: `params`: of the train stage."""
        self._params = params
        self._names = {id(item): name for name, item in parameters.items()}
        matrices = {n: p for n, p in parameters.items() if _is_matrix(n, p)}
        rest = dict(parameters)
        self._parts: list[tuple[Any, float]] = []
        if params.optimizer == "muon":
            rest = {name: item for name, item in parameters.items() if name not in matrices}
            if matrices:
                self._parts.append((Muon(list(matrices.values()), params), params.muon_lr))
        if rest:
            adamw = torch.optim.AdamW(
                list(rest.values()),
                lr=params.lr,
                betas=tuple(params.adam_betas),
                eps=params.adam_eps,
                weight_decay=params.weight_decay,
                fused=True,
            )
            self._parts.append((adamw, params.lr))

    def step(self, factor: float) -> None:
        """Take a step with rates of so many times their base; gradients are gone after."""
        for part, rate in self._parts:
            for group in part.param_groups:
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def rates(self, factor: float) -> dict[str, float]:
        return {type(part).__name__: rate * factor for part, rate in self._parts}

    def state(self) -> dict[str, Any]:
        """Every tensor of the state, by parameter and name, as it is: fp32."""
        found = {}
        for part, _ in self._parts:
            for parameter, values in part.state.items():
                for name, value in values.items():
                    found[f"{self._names[id(parameter)]}/{name}"] = value
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the state that `state` gave.

        Raises:
            ValueError: it is of other parameters.
        """
        left = dict(state)
        for part, _ in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    prefix = f"{self._names[id(parameter)]}/"
                    own = {n: v for n, v in left.items() if n.startswith(prefix)}
                    for name in own:
                        del left[name]
                    part.state[parameter] = {
                        # Counters stay on the CPU unless the kernel is fused on a GPU.
                        name.removeprefix(prefix): value.to(parameter.device)
                        for name, value in own.items()
                    }
        if left:
            raise ValueError(f"the optimizer has no use for {', '.join(sorted(left)[:3])}")


def _is_matrix(name: str, parameter: Any) -> bool:
    return (
        parameter.ndim == 2
        and min(parameter.shape) > 1
        and not any(hint in name for hint in _ADAMW_NAMES)
    )


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Momentum, orthogonalized; the update has the root mean square of AdamW's (0.2)."""

    def __init__(self, parameters: list[Any], params: Any):
        super().__init__(parameters, {"lr": params.muon_lr})
        self._momentum = params.muon_momentum
        self._decay = params.muon_weight_decay
        self._steps = params.muon_steps

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - self._momentum)
                update = parameter.grad.lerp(buffer, self._momentum)  # Nesterov
                parameter.mul_(1 - group["lr"] * self._decay)
                ratio = 0.2 * math.sqrt(max(parameter.shape))
                parameter.add_(orthogonal(update, self._steps), alpha=-group["lr"] * ratio)


def orthogonal(matrix: Any, steps: int) -> Any:
    """The nearest semi-orthogonal matrix, roughly: Newton-Schulz in bf16, [rows, columns]."""
    x = matrix.bfloat16()
    turned = x.shape[0] > x.shape[1]
    if turned:
        x = x.T
    x = x / norm(x).clamp(min=_EPS).to(x.dtype)
    for _ in range(steps):
        gram = _symmetric(x, x.T)
        x = torch.addmm(x, _symmetric(gram, gram, gram), x, beta=_A)
    return x.T if turned else x


def _symmetric(left: Any, right: Any, added: Any = None) -> Any:
    """left · right, known to be symmetric; with `added`, also symmetric, `_B` · added + `_C` times
    that. Of large ones the strips above the diagonal are computed and the rest copied."""
    rows = left.shape[0]
    if rows < _SYMMETRIC_FROM or rows % _STRIPS:
        if added is None:
            return left @ right
        return torch.addmm(added, left, right, beta=_B, alpha=_C)
    size = rows // _STRIPS
    found = torch.empty(rows, rows, dtype=left.dtype, device=left.device)
    for first in range(0, rows, size):
        last = first + size
        strip = found[first:last, first:]
        if added is None:
            torch.mm(left[first:last], right[:, first:], out=strip)
        else:
            own = added[first:last, first:]
            torch.addmm(own, left[first:last], right[:, first:], beta=_B, alpha=_C, out=strip)
        if first:
            found[first:last, :first] = found[:first, first:last].T
    return found


def norm(x: Any) -> Any:
    """The 2-norm of a tensor, in fp32. Row by row: a sum over everything would be split over
    threads, and come out by their number."""
    rows = x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)
    return torch.linalg.vector_norm(
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).flatten()
    )


def clip(parameters: Mapping[str, Any], most: float | None) -> Any:
    """Scale all gradients down to a norm of at most `most` together; returns the norm it was,
    on the device (as `torch.nn.utils.clip_grad_norm_`)."""
    gradients = [item.grad for item in parameters.values() if item.grad is not None]
    found = torch.linalg.vector_norm(torch.stack([norm(item) for item in gradients]))
    if most is not None:
        scale = (most / (found + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
    return found
