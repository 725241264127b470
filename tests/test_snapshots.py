"""Saved checkpoints in the store: what is kept of them, and what a training goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.books import Books
from kimi_eagle.job import SNAPSHOTS
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.store import Registry
from kimi_eagle.snapshots import Saved, Snapshots, kept, starts_anew
from kimi_eagle.stages.train.spec import Keep, Train, TrainParams, trajectory_of

BASE = {"kind": "train", "head": "h", "states": "s", "vocab": "v"}


def params_of(**values: Any) -> TrainParams:
    return TrainParams.model_validate({**BASE, **values}, strict=False)


def document_of(**values: Any) -> dict[str, Any]:
    parameters = Train.identity(params_of(**values), None)
    inputs = {"states": ["a" * 64], "rows": ["b" * 64]}
    return {"kind": "train", "code_version": 2, "parameters": parameters, "inputs": inputs}


def saved(step: int, epoch: int, cursor: int = 0, loss: float | None = None) -> Saved:
    return Saved(ArtifactRecord(f"{step}", "snapshot", 1, {}), step, epoch, cursor, loss)


HISTORY = [
    saved(4, 1, 0, 3.0),
    saved(6, 1, 2),
    saved(8, 2, 0, 2.0),
    saved(12, 3, 0, 2.5),
    saved(14, 3, 2),
    saved(16, 4, 0, 2.0),
]


@pytest.mark.parametrize(
    ("keep", "last", "expected"),
    [
        (Keep(best=0, last=1), True, {16}),
        (Keep(best=1, last=2), True, {8, 14, 16}),
        (Keep(best=2, last=1), True, {8, 16}),
        (Keep(best=0, last=1, every=3), True, {12, 16}),
        (Keep(best=1, last=2), False, {8}),
        (Keep(best=0, last=2, every=2), False, {8, 16}),
    ],
)
def test_a_policy_keeps_the_best_the_last_and_every_so_many(
    keep: Keep, last: bool, expected: set[int]
) -> None:
    """Of two equally good ones the earlier: it is the one whose weights the stage gives."""
    assert kept(HISTORY, keep, last=last) == {str(step) for step in expected}


def test_what_does_not_change_the_steps_is_not_of_the_trajectory() -> None:
    base = trajectory_of(document_of())
    assert trajectory_of(document_of(keep={"best": 3, "last": 5, "every": 1})) == base
    placement = {"save_steps": 5, "loader_workers": 3, "log_steps": 1, "devices": 4}
    shared = trajectory_of(document_of(accumulate=4))
    assert trajectory_of(document_of(accumulate=4, **placement)) == shared
    for other in (
        {"lr": 1e-4},
        {"seed": 1},
        {"keep": "last"},
        {"accumulate": 2},
        {"precision": "fp32"},
        {"clip_grad_norm": None},
        {"epochs": 5},
    ):
        assert trajectory_of(document_of(**other)) != base, other


@pytest.mark.parametrize("scheduler", ["constant", "none", "linear", "cosine"])
def test_more_epochs_are_the_same_trajectory_where_the_schedule_is_steady(scheduler: str) -> None:
    three, five = (document_of(scheduler=scheduler, epochs=epochs) for epochs in (3, 5))
    assert three != five
    steady = scheduler in ("constant", "none")
    assert (trajectory_of(three) == trajectory_of(five)) is steady


def test_why_more_epochs_start_anew_is_said() -> None:
    three, five = document_of(epochs=3), document_of(epochs=5)
    found = starts_anew(three, five)
    assert found is not None
    assert "epochs 3 → 5: the linear schedule falls over all of them" in found
    assert starts_anew(three, three) is None
    assert starts_anew(None, five) is None
    assert starts_anew(document_of(epochs=3, lr=1e-4), five) is None
    steady = {"scheduler": "none"}
    assert starts_anew(document_of(**steady, epochs=3), document_of(**steady, epochs=5)) is None


def test_what_changes_nothing_is_not_in_the_key() -> None:
    assert document_of(muon_steps=7) == document_of()
    assert document_of(optimizer="muon", muon_steps=7) != document_of(optimizer="muon")
    constant = {"scheduler": "constant"}
    assert document_of(**constant, warmup_ratio=0.5) == document_of(**constant)
    assert document_of(keep="best") == document_of(keep={"best": 2})
    assert document_of(keep="last") == document_of(keep={"best": 0})
    assert document_of(vocab="another") == document_of()


class Store:
    """A root with a registry, and one execution that saves."""

    def __init__(self, root: Path):
        self.root = root
        self.registry = Ledger(root)
        digests = Digests(self.registry)
        self.objects = Objects(root, digests)
        books = Books(root, self.registry, lambda _text: None)
        self.snapshots = Snapshots(root, self.registry, self.objects, books)
        common = {"manifest_digest": "", "manifest_path": "", "manifest_text": "", "pid": 0}
        common |= {"resolved": "{}", "overrides": "[]", "environment": "{}", "host": ""}
        (root / "run1").mkdir()
        self.registry.begin_run("run1", name="n", **common)

    def begin(self, document: dict[str, Any]) -> int:
        return self.registry.begin_execution(
            "run1", "draft", "train", "k" * 64, document, {}, [], "attempt", {}
        )

    def save(
        self, execution: int, document: dict[str, Any], keep: Keep, step: int, **state: Any
    ) -> None:
        folder = self.root / ".staging" / "run1-draft"
        staged = folder / SNAPSHOTS / str(step)
        staged.mkdir(parents=True)
        known = {"step": step, "epoch": step // 4, "cursor": step % 4, "validation": None}
        (staged / "state.json").write_text(json.dumps({**known, **state}))
        (staged / "model.safetensors").write_bytes(b"%d" % step)
        production = {"key": "k" * 64, "document": document, "stage": "draft", "run": "run1"}
        event = {"name": str(step), "step": step, "epoch": 0, "parent": None}
        self.snapshots.taker(execution, "run1", production, keep)(folder, event)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path)
    yield found
    found.registry.close()


def test_a_training_goes_on_from_the_last_whole_snapshot(store: Store) -> None:
    document, keep = document_of(), Keep(best=0, last=3)
    execution = store.begin(document)
    for step in (2, 4, 6, 8):
        store.save(execution, document, keep, step)
    assert sorted(item.step for item in store.snapshots.of(document)) == [4, 6, 8]
    latest = store.snapshots.latest(document, params_of())
    assert latest is not None
    assert (latest.step, latest.epoch, latest.cursor) == (8, 2, 0)
    assert store.snapshots.latest(document_of(lr=1e-4), params_of(lr=1e-4)) is None
    # Damaged, it is passed over for the one before.
    weights = store.objects.path(latest.record.digest) / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"x")
    earlier = store.snapshots.latest(document, params_of())
    assert earlier is not None
    assert earlier.step == 6
    store.registry.end_execution(execution, "executed", seconds=1.0)
    (made,) = Registry(store.root).stages_of("run1")
    assert made.outputs == {}, "what is saved on the way is not what the stage is for"


def test_a_snapshot_beyond_the_last_epoch_is_not_for_fewer(store: Store) -> None:
    steady = {"scheduler": "constant"}
    document = document_of(**steady, epochs=5)
    execution = store.begin(document)
    for step in (8, 12, 14):
        store.save(execution, document, Keep(best=0, last=9), step)
    fewer = document_of(**steady, epochs=3)
    for epochs, expected in ((5, 14), (4, 14), (3, 12), (2, 8)):
        latest = store.snapshots.latest(fewer, params_of(**steady, epochs=epochs))
        assert latest is not None
        assert latest.step == expected
    assert store.snapshots.latest(fewer, params_of(**steady, epochs=1)) is None


def test_pinned_snapshots_stay(store: Store) -> None:
    from kimi_eagle.registry.keeping import Keeper

    document, keep = document_of(), Keep(best=0, last=1)
    execution = store.begin(document)
    store.save(execution, document, keep, 2)
    (first,) = store.snapshots.of(document)
    Keeper(store.registry).pin(first.record.digest, "", "now")
    for step in (4, 6):
        store.save(execution, document, keep, step)
    assert sorted(item.step for item in store.snapshots.of(document)) == [2, 6]
    store.snapshots.let_go("run1", document, keep, ended=True)
    assert [item.step for item in store.snapshots.of(document)] == [2]
    assert not list((store.root / ".staging").glob("discarded*"))


def test_devices_without_work_are_refused() -> None:
    with pytest.raises(ValueError, match="8 devices share the batches of an optimizer step"):
        params_of(devices=8, accumulate=4)


def test_keep_is_read_in_both_forms() -> None:
    assert params_of(keep="best").retention == Keep(best=1)
    assert params_of(keep="last").retention == Keep(best=0)
    assert params_of(keep={"best": 0, "every": 2}).retention == Keep(best=0, every=2)
    assert params_of().retention == Keep(best=1, last=2)


def test_a_vocabulary_is_needed_unless_a_checkpoint_has_one() -> None:
    with pytest.raises(ValueError, match="vocab is required"):
        params_of(vocab=None)
    assert params_of(vocab=None, init_from="abcd").vocab is None
