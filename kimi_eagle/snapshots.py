"""Checkpoints that are saved while a training runs: taken into the store, found again, let go.

A snapshot is an artifact like any other, and an output of the execution that saved it, under the
role `snapshot@<step>`. Work on the same steps goes on from the last whole one, whichever run saved
it: what the steps are is their trajectory (`stages.train.spec.trajectory_of`), and the execution
that goes on has the snapshot among its inputs, as `resume`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.books import Books
from kimi_eagle.eviction import alive, grave_of, take_away
from kimi_eagle.identity import digest_document
from kimi_eagle.job import SNAPSHOTS, StageFailed
from kimi_eagle.records import SNAPSHOT_ROLE, ArtifactRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.stages.train.spec import STEADY, Keep, TrainParams, trajectory_of

KIND = "snapshot"
STATE = "state.json"


@dataclass(frozen=True)
class Saved:
    """A snapshot that is in the store."""

    record: ArtifactRecord
    step: int
    epoch: int
    """Epochs done whole."""
    cursor: int
    """Steps done of the epoch after those."""
    loss: float | None
    """Validation loss at the end of the epoch."""


class Snapshots:
    """The snapshots under one root."""

    def __init__(self, root: Path, registry: Ledger, objects: Objects, books: Books):
        self._root = root
        self._registry = registry
        self._objects = objects
        self._books = books

    def latest(self, document: Mapping[str, Any], params: TrainParams) -> Saved | None:
        """The snapshot that a training of this key document goes on from: the furthest that is
        whole and not beyond its last epoch."""
        for saved in sorted(self.of(document), key=lambda item: -item.step):
            beyond = saved.epoch + (saved.cursor > 0) > params.epochs
            if not beyond and self._objects.trouble(saved.record) is None:
                return saved
        return None

    def of(self, document: Mapping[str, Any]) -> list[Saved]:
        """The snapshots on a document's trajectory that are in the store."""
        wanted = _trajectory(document)
        found: dict[str, Saved] = {}
        for digest, theirs in self._registry.snapshots():
            if digest not in found and _trajectory(theirs) == wanted:
                saved = self._read(digest)
                if saved is not None:
                    found[digest] = saved
        return list(found.values())

    def _read(self, digest: str) -> Saved | None:
        record = self._registry.artifact(digest)
        try:
            state = json.loads((self._objects.path(digest) / STATE).read_text("utf-8"))
            validation = state["validation"] if state["cursor"] == 0 else None
            loss = validation["loss"] if validation else None
            place = int(state["step"]), int(state["epoch"]), int(state["cursor"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Saved(record, *place, loss) if record is not None else None

    def let_go(
        self, run_id: str, document: Mapping[str, Any], keep: Keep, *, ended: bool = False
    ) -> None:
        """Evict the snapshots of a trajectory that nobody wants. The caller holds the gate.

        Args: `ended`: the stage came to its end: what was there to go on from is wanted only where
            more epochs can go on from it.
        """
        saved = self.of(document)
        steady = document["parameters"].get("scheduler") in STEADY
        wanted = kept(saved, keep, last=not ended or steady)
        keeper = Keeper(self._registry)
        pinned = keeper.pins()
        going = [
            item.record.digest
            for item in saved
            if item.record.digest not in wanted and item.record.digest not in pinned
        ]
        if not going:
            return
        others = alive(self._root) - {run_id}
        with grave_of(self._root, run_id) as grave:
            take_away(self._objects, keeper, going, (), lambda: others, grave)

    def taker(
        self, execution: int, run_id: str, production: Mapping[str, Any], keep: Keep
    ) -> Callable[[Path, Mapping[str, Any]], None]:
        """What takes a snapshot in when a worker announces it."""
        parents: dict[int, str] = {}

        def take(folder: Path, event: Mapping[str, Any]) -> None:
            staged = folder / SNAPSHOTS / event["name"]
            try:
                record = self._objects.describe(staged, KIND)
            except ValueError as error:
                raise StageFailed(str(error)) from None
            role = f"{SNAPSHOT_ROLE}{event['step']}"
            made = {
                **production,
                # A record of its own makes it no finished execution (see `recovery`).
                "disposition": "interrupted",
                "role": role,
                "step": event["step"],
                "epoch": event["epoch"],
                "parent": parents.get(event["parent"]),
            }
            with gate(self._root, shared=True):
                self._objects.publish(staged, record, made)
                self._registry.add_output(execution, role, record)
                self._books.execution(execution)
                self.let_go(run_id, production["document"], keep)
            parents[event["step"]] = record.digest

        return take


def kept(saved: Sequence[Saved], keep: Keep, *, last: bool = True) -> set[str]:
    """The digests of the snapshots that a policy keeps."""
    by_step = sorted(saved, key=lambda item: item.step)
    ends = [item for item in by_step if item.cursor == 0]
    best = sorted((item for item in ends if item.loss is not None), key=_by_loss)[: keep.best]
    wanted = best + (by_step[-keep.last :] if last else [])
    if keep.every is not None:
        wanted += [item for item in ends if item.epoch % keep.every == 0]
    return {item.record.digest for item in wanted}


def starts_anew(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Why a training that differs from one before in its epochs alone cannot go on from it."""
    if before is None or before == now:
        return None
    epochs = before["parameters"].get("epochs"), now["parameters"]["epochs"]
    same_but = {**before["parameters"], "epochs": epochs[1]}
    scheduler = now["parameters"]["scheduler"]
    if {**before, "parameters": same_but} != now or scheduler in STEADY:
        return None
    return (
        f"epochs {epochs[0]} → {epochs[1]}: the {scheduler} schedule falls over all of them, so "
        "training starts from the beginning (with `scheduler: constant` or `none` it would go on)"
    )


def _by_loss(saved: Saved) -> tuple[float, int]:
    assert saved.loss is not None
    return saved.loss, saved.step


def _trajectory(document: Mapping[str, Any]) -> str:
    return digest_document("trajectory/1", trajectory_of(document))
