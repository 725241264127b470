"""A training as it stands after a step: all that going on from there takes. Imports torch.

    state.json             step, epoch, cursor, parent, figures, what was kept
    model.safetensors      the trained parameters, fp32
    optimizer.safetensors  every tensor of the optimizer's state, fp32
    rng.safetensors        the states of the generators
    kept.safetensors       the trained parameters of the best epoch so far, bf16 (where one is kept)

The learning rate is a function of the step and needs no state, and neither does the order of the
rows. A folder is written under another name, made to last, and renamed: it is whole or not there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_eagle.artifacts.files import sync_folder, sync_tree, write_json

STATE = "state.json"
MODEL, OPTIMIZER, RNG, KEPT = (
    f"{name}.safetensors" for name in ("model", "optimizer", "rng", "kept")
)


@dataclass(frozen=True)
class Progress:
    """Where a training stands."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs done whole."""
    cursor: int = 0
    """Steps done of the epoch after those."""
    parent: int | None = None
    """The step of the snapshot that was saved before this one."""
    best_loss: float | None = None
    """The lowest validation loss so far."""
    kept: Mapping[str, float] | None = None
    """Validation figures of the epoch whose weights are kept."""
    kept_epoch: int | None = None
    """The epoch that `kept` is of, from 1."""
    validation: Mapping[str, float] | None = None
    """Figures of the last validation; None until there is one."""


class BadSnapshot(ValueError):
    """A snapshot that nothing can go on from; the message says what is wrong with it."""


def write(
    folder: Path,
    progress: Progress,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    kept: Mapping[str, Any] | None,
) -> None:
    """Write a snapshot as `folder`, whole or not at all."""
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(partial / STATE, {**asdict(progress), "format": "kimi-eagle.snapshot/1"})
    save_file(_plain(model), partial / MODEL)
    save_file(_plain(optimizer), partial / OPTIMIZER)
    save_file(_generators(), partial / RNG)
    if kept is not None:
        save_file(_plain(kept), partial / KEPT)
    sync_tree(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)  # noqa: PTH104 - the one step that makes it a snapshot
    sync_folder(folder.parent)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot as read."""

    progress: Progress
    model: dict[str, Any]
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    kept: dict[str, Any] | None


def read(folder: Path) -> Snapshot:
    """Raises: BadSnapshot: a file is missing or damaged; nothing is made up for it."""
    try:
        document = json.loads((folder / STATE).read_text("utf-8"))
        if document.pop("format") != "kimi-eagle.snapshot/1":
            raise BadSnapshot(f"{folder / STATE} is of another version of this program")
        progress = Progress(**document)
        model, optimizer, rng = (load_file(folder / name) for name in (MODEL, OPTIMIZER, RNG))
        kept = load_file(folder / KEPT) if progress.kept_epoch is not None else None
    except BadSnapshot:
        raise
    except Exception as error:  # noqa: BLE001 - safetensors has errors of its own
        raise BadSnapshot(f"the snapshot {folder} is not whole: {error}") from None
    return Snapshot(progress, model, optimizer, rng, kept)


def restore_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _generators() -> dict[str, Any]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _plain(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
