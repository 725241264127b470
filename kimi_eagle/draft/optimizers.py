"""AdamW (torch's) and Muon, as one, with state that can be saved whole. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from kimi_eagle.draft.muon import Muon

# speculators' rule for what is no matrix to Muon.
_ADAMW_NAMES = ("embed_tokens", "lm_head")


class Optimizer:
    """The optimizers of a draft, as one."""

    def __init__(
        self, parameters: Mapping[str, Any], params: Any, *, compiled: bool, others: Container[str]
    ):
        """
        Args:
            params: of the train stage.
            others: names of parameters that another process steps.
        """
        self._others = [name for name in parameters if name in others]
        parameters = {name: p for name, p in parameters.items() if name not in others}
        self._names = {id(item): name for name, item in parameters.items()}
        matrices = {n: p for n, p in parameters.items() if _is_matrix(n, p)}
        rest = dict(parameters)
        self._parts: list[tuple[Any, float]] = []
        if params.optimizer == "muon":
            rest = {name: item for name, item in parameters.items() if name not in matrices}
            if matrices:
                muon = Muon(list(matrices.values()), params, compiled=compiled)
                self._parts.append((muon, params.muon_lr))
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
        left = {name: v for name, v in state.items() if name.rpartition("/")[0] not in self._others}
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


def owners(parameters: Mapping[str, Any], params: Any, processes: int) -> dict[str, int]:
    """Which process steps a parameter, so that each has about as much to do."""
    work = {name: item.numel() for name, item in parameters.items()}
    if params.optimizer == "muon":
        for name, item in parameters.items():
            # Of a product with the smaller side; what is no matrix costs next to nothing.
            work[name] *= min(item.shape) if _is_matrix(name, item) else 1
    busy = [0] * processes
    found = {}
    for name in sorted(work, key=lambda name: (-work[name], name)):
        found[name] = busy.index(min(busy))
        busy[found[name]] += work[name]
    return found


def _is_matrix(name: str, parameter: Any) -> bool:
    return (
        parameter.ndim == 2
        and min(parameter.shape) > 1
        and not any(hint in name for hint in _ADAMW_NAMES)
    )


def norm(x: Any) -> Any:
    """The 2-norm of a tensor, in fp32. Row by row: a sum over everything would be split over
    threads, and come out by their number."""
    rows = x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)
    return torch.linalg.vector_norm(
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).flatten()
    )


def clip(
    parameters: Mapping[str, Any],
    most: float | None,
    add_up: Callable[[Sequence[Any]], None] = lambda _: None,
) -> Any:
    """Scale all gradients down to a norm of at most `most` together; returns the norm it was,
    on the device (as `torch.nn.utils.clip_grad_norm_`).

    Args: `add_up`: adds tensors up over processes, each of which has some of the gradients.
    """
    gradients = [item.grad for item in parameters.values() if item.grad is not None]
    nothing = torch.zeros((), device=next(iter(parameters.values())).device)
    norms = torch.stack(
        [nothing if item.grad is None else norm(item.grad) for item in parameters.values()]
    )
    add_up([norms])
    found = torch.linalg.vector_norm(norms)
    if most is not None:
        scale = (most / (found + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, scale)
    return found
