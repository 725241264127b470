"""Sample files of other trainers: their names, and what is in them. Imports torch.

- v1, of speculators 0.3.0: `data_N.pt` or `data_N.safetensors` with `input_ids` [tokens],
  `loss_mask` [tokens] and `hidden_states`, a list of [tokens, hidden], one for each layer, the
  last layer's at the end (in safetensors one tensor of three axes).
- speculators: `hs_N.safetensors` with `token_ids` [tokens] and `hidden_states`
  [tokens, layers, hidden].
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kimi_eagle.states.contract import AXES

# No sign, no underscore, no leading zero, ASCII digits: `int()` reads `1_0` as 10.
_NAMES = {
    "v1": re.compile(r"data_(0|[1-9][0-9]*)\.(?:pt|safetensors)", re.ASCII),
    "speculators": re.compile(r"hs_(0|[1-9][0-9]*)\.safetensors", re.ASCII),
}
_IDS = {"v1": "input_ids", "speculators": "token_ids"}


class BadSample(ValueError):
    """A sample file that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Sample:
    """What one file holds."""

    token_ids: Any
    """int64 [tokens]."""
    loss_mask: Any | None
    """int64 [tokens], of a v1 file."""
    states: Any | None
    """[tokens, layers, hidden] as it is stored, bfloat16 where nothing is lost by it."""


def sample_files(paths: Iterable[Path], form: str) -> tuple[list[tuple[int, Path]], list[Path]]:
    """(number, path) of the files whose names are exactly those of a format, by number; and the
    others, which are never read.

    Raises:
        BadSample: two files of one number, or one that is still being written.
    """
    found: dict[int, Path] = {}
    others = []
    for path in paths:
        match = _NAMES[form].fullmatch(path.name)
        if match is None:
            others.append(path)
            continue
        number = int(match[1])
        if number in found:
            raise BadSample(f"{found[number]} and {path} are both sample {number}: remove one")
        _not_being_written(path)
        found[number] = path
    return sorted(found.items()), others


def _not_being_written(path: Path) -> None:
    """Raises: BadSample when a living process holds the lock beside a file."""
    lock = path.with_name(path.name + ".lock")
    if not lock.exists():
        return
    descriptor = os.open(lock, os.O_RDWR)  # over NFS a lock for reading alone is refused
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadSample(f"{path} is still being written ({lock.name} is held)") from None
    finally:
        os.close(descriptor)


def read_ids(path: Path, form: str) -> Any:
    """The token ids of a file alone: int64 [tokens]. Raises: BadSample."""
    if path.suffix == ".pt":
        return _flat(_unpickled(path), _IDS[form], path)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            tensors = {_IDS[form]: file.get_tensor(_IDS[form])} if _IDS[form] in names else {}
    except (OSError, SafetensorError) as error:
        raise BadSample(f"{path} cannot be read: {error}") from None
    return _flat(tensors, _IDS[form], path)


def read_sample(path: Path, form: str, axes: str = AXES) -> Sample:
    """All of a file.

    Args:
        axes: the order of the axes of `hidden_states` where that is one tensor.

    Raises:
        BadSample: it cannot be read, would run code, lacks something, or holds states of a type
            that bfloat16 would lose something of.
    """
    if path.suffix == ".pt":
        found: Mapping[str, Any] = _unpickled(path)
    else:
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise BadSample(f"{path} cannot be read: {error}") from None
    ids = _flat(found, _IDS[form], path)
    mask = _flat(found, "loss_mask", path) if form == "v1" else None
    if mask is not None and mask.shape != ids.shape:
        raise BadSample(f"{path}: {len(ids)} input_ids, and a loss_mask of {len(mask)}")
    states = found.get("hidden_states")
    return Sample(ids, mask, None if states is None else _states(states, axes, path))


def _unpickled(path: Path) -> Mapping[str, Any]:
    """A `.pt` file of plain tensors; nothing in it can run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise BadSample(
            f"{path} holds more than plain tensors, and to load that could run code of whoever "
            "wrote it: save the tensors alone, or as safetensors"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise BadSample(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise BadSample(f"{path} holds no mapping of names to tensors")
    return found


def _flat(found: Mapping[str, Any], name: str, path: Path) -> Any:
    """Whole numbers along one axis: int64 [tokens]."""
    value = found.get(name)
    if value is None:
        raise BadSample(f"{path} has no `{name}`")
    if isinstance(value, list):
        value = torch.tensor(value)
    whole = isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex()
    )
    if not whole or value.dim() != 1:
        kind = f"{value.dtype} {list(value.shape)}" if hasattr(value, "shape") else type(value)
        raise BadSample(f"{path}: `{name}` is {kind}; expected whole numbers [tokens]")
    return value.to(torch.int64)


def _states(value: Any, axes: str, path: Path) -> Any:
    """[tokens, layers, hidden] of a list of layers or of one tensor."""
    if isinstance(value, list | tuple):
        shapes = {tuple(item.shape) for item in value if isinstance(item, torch.Tensor)}
        tensors = all(isinstance(item, torch.Tensor) for item in value)
        if not tensors or len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise BadSample(
                f"{path}: `hidden_states` is a list of shapes {sorted(map(list, shapes))}; "
                "expected equal ones, [tokens, hidden]"
            )
        states = torch.stack(list(value), dim=1)
    elif isinstance(value, torch.Tensor) and value.dim() == 3:
        states = value if axes == AXES else value.transpose(0, 1).contiguous()
    else:
        raise BadSample(f"{path}: `hidden_states` is neither a list of layers nor of three axes")
    if states.dtype == torch.bfloat16:
        return states
    narrow = states.to(torch.bfloat16)
    same = (narrow.to(states.dtype) == states) | torch.isnan(states)
    if not bool(same.all()):
        raise BadSample(
            f"{path}: `hidden_states` is {str(states.dtype).removeprefix('torch.')}, and bfloat16 "
            "would lose something of it: nothing is rounded on the way in"
        )
    return narrow
