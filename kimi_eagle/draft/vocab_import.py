"""Read a vocabulary map that another tool made, and bring it to the one form, or refuse it.

Taken are `.safetensors` (tensors `t2d` and `d2t`; others are passed over, so that a draft's own
weights do) and `.npy` (named `…t2d.npy`, `…d2t.npy`). One of the two maps is enough where it says
all: `t2d` always does, `d2t` where only one of its two readings holds together. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from kimi_eagle.draft.vocab import BadVocab, VocabMap, check_map

OFFSETS, ABSOLUTE, AUTO = "offsets", "absolute", "auto"
_NAMES = ("t2d", "d2t")


def import_map(paths: Sequence[Path], verifier_size: int, reading: str = AUTO) -> VocabMap:
    """The map in files, in the one form: t2d bool, d2t int64 offsets.

    Args:
        reading: what `d2t` holds: `offsets` (verifier id minus draft id), `absolute` (verifier
            ids), or `auto` for whichever of them holds together.

    Raises:
        BadVocab: no map, one that cannot be read, or one that does not hold together.
    """
    found: dict[str, Any] = {}
    for path in paths:
        for name, tensor in _tensors(path).items():
            if name in found:
                raise BadVocab(f"{path.name}: {name} is given twice")
            found[name] = tensor
    if not found:
        raise BadVocab(f"{', '.join(path.name for path in paths)} holds neither t2d nor d2t")
    t2d, d2t = found.get("t2d"), found.get("d2t")
    if d2t is None:
        assert t2d is not None
        marked = _mask(t2d, verifier_size).nonzero().flatten()
        offsets = marked - torch.arange(len(marked))
        return check_map(t2d, offsets, verifier_size, len(marked))
    ids = _verifier_ids(d2t, t2d, verifier_size, reading)
    if t2d is None:
        t2d = torch.zeros(verifier_size, dtype=torch.bool)
        t2d[ids] = True
    return check_map(t2d, ids - torch.arange(len(ids)), verifier_size, len(ids))


def _verifier_ids(d2t: Any, t2d: Any, verifier_size: int, reading: str) -> Any:
    """The verifier's ids that `d2t` stands for, int64, ascending."""
    if d2t.ndim != 1 or len(d2t) == 0:
        raise BadVocab(f"d2t has shape {list(d2t.shape)}; it must be a list of ids or offsets")
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise BadVocab(f"d2t must be integers, found {d2t.dtype}")
    d2t = d2t.to(torch.int64)
    readings = {OFFSETS: d2t + torch.arange(len(d2t)), ABSOLUTE: d2t}
    if reading != AUTO:
        readings = {reading: readings[reading]}
    whole = {name: ids for name, ids in readings.items() if _holds(ids, verifier_size)}
    if not whole:
        raise BadVocab(_what_is_wrong(readings, verifier_size))
    if t2d is not None:
        marked = _mask(t2d, verifier_size).nonzero().flatten()
        agreeing = {name: ids for name, ids in whole.items() if torch.equal(ids, marked)}
        if not agreeing:
            raise BadVocab(_disagreement(whole, marked))
        whole = agreeing
    if len(whole) > 1 and not torch.equal(*whole.values()):
        raise BadVocab(
            "d2t reads as offsets and as absolute ids: say which (`d2t: offsets` or "
            "`d2t: absolute`), or give t2d beside it"
        )
    return next(iter(whole.values()))


def _holds(ids: Any, verifier_size: int) -> bool:
    ascending = bool((ids[1:] > ids[:-1]).all())
    return ascending and int(ids[0]) >= 0 and int(ids[-1]) < verifier_size


def _what_is_wrong(readings: dict[str, Any], verifier_size: int) -> str:
    parts = []
    for name, ids in readings.items():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= verifier_size:
            wrong = low if low < 0 else high
            parts.append(f"as {name} it names token {wrong} of a verifier vocab of {verifier_size}")
        else:
            at = int((ids[1:] <= ids[:-1]).nonzero()[0]) + 1
            parts.append(
                f"as {name} its tokens are not ascending (draft id {at}: {int(ids[at])} after "
                f"{int(ids[at - 1])})"
            )
    return f"d2t does not hold together: {'; '.join(parts)}"


def _disagreement(whole: dict[str, Any], marked: Any) -> str:
    name, ids = next(iter(whole.items()))
    if len(ids) != len(marked):
        return f"d2t has {len(ids)} tokens, and t2d marks {len(marked)}"
    at = int((ids != marked).nonzero()[0])
    return (
        f"d2t, read as {name}, does not point to the tokens that t2d marks: draft id {at} is "
        f"{int(ids[at])}, and t2d marks {int(marked[at])}"
    )


def _mask(t2d: Any, verifier_size: int) -> Any:
    """`t2d` as bool; its count is its own here."""
    if t2d.shape != (verifier_size,) or t2d.is_floating_point():
        check_map(t2d, torch.zeros(0, dtype=torch.int64), verifier_size, 0)  # says what is wrong
    return t2d if t2d.dtype == torch.bool else t2d != 0


def _tensors(path: Path) -> dict[str, Any]:
    """`t2d` and `d2t` of one file."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in _NAMES if name in file.keys()}  # noqa: SIM118
        if path.suffix == ".npy":
            names = [name for name in _NAMES if path.stem.endswith(name)]
            if len(names) != 1:
                raise BadVocab(f"{path.name}: name it after what it holds, t2d.npy or d2t.npy")
            array = np.load(path, allow_pickle=False)
            if array.dtype.kind not in "biuf":
                raise BadVocab(f"{path.name}: an array of {array.dtype}, not of numbers")
            return {names[0]: torch.from_numpy(np.ascontiguousarray(array))}
    except (OSError, ValueError, TypeError, EOFError, SafetensorError) as error:
        if isinstance(error, BadVocab):
            raise
        raise BadVocab(f"{path.name} cannot be read: {error}") from None
    raise BadVocab(
        f"{path.name}: a map is read from .safetensors or .npy; what torch.save wrote (.pt, .bin) "
        "can run code when it is read: save its tensors as safetensors"
    )
