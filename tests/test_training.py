"""The training loop: broken off anywhere and gone on, it ends in the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CORES

pytest.importorskip("speculators", reason="needs the extra cpu or gpu")

from trainings import (
    data_of,
    new_model,
    new_trainer,
    params_of,
    parts_of,
    random_rows,
    vocab_map,
    write_head,
)

from kimi_eagle.draft import snapshot as snapshots
from kimi_eagle.draft.figures import Diverged, Impossible, values_of
from kimi_eagle.draft.model import BadStart, prove_frozen, trained
from kimi_eagle.draft.probe import probe
from kimi_eagle.draft.schedule import factor
from kimi_eagle.draft.snapshot import BadSnapshot
from kimi_eagle.draft.trainer import Stopped, Trainer
from kimi_eagle.identity import digest_file
from kimi_eagle.stages.train.spec import Train

LENGTHS = [23, 17, 20, 31, 9, 40, 25, 14, 33, 28, 19, 12]
TRAIN, VALIDATE = range(9), range(9, 12)
BASE = {
    "epochs": 3,
    "lr": 5e-3,
    "warmup_ratio": 0.2,
    "noise": {"kind": "uniform", "std": 0.05},
    "ttt_steps": 2,
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("training") / "head")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return random_rows(tmp_path_factory.mktemp("rows"), LENGTHS)


def trainer_of(
    head: Path, rows: tuple[Any, Any], folder: Path | None = None, **values: Any
) -> Trainer:
    more = {n: values.pop(n) for n in ("stopping", "report", "announce") if n in values}
    params = params_of(**{**BASE, **values})
    train, validate = (data_of(*rows, params, part) for part in (TRAIN, VALIDATE))
    return new_trainer(head, params, train, validate, snapshots=folder, **more)


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in sorted(folder.iterdir())}


def last_of(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: int(path.name))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def after(steps: int) -> Callable[[], bool]:
    """Asks to stop after so many steps."""
    left = [steps]

    def asked() -> bool:
        left[0] -= 1
        return left[0] <= 0

    return asked


@pytest.mark.parametrize(
    ("optimizer", "everywhere"),
    [
        ("adamw", False),
        pytest.param("adamw", True, marks=pytest.mark.slow),
        pytest.param("muon", True, marks=pytest.mark.slow),
    ],
)
def test_stopped_after_any_step_it_ends_in_the_same_bytes(
    head: Path, rows: tuple[Any, Any], tmp_path: Path, optimizer: str, everywhere: bool
) -> None:  # TRN-09, TRN-10, TRN-11
    values = {"optimizer": optimizer, "epochs": 3 if everywhere else 2}
    seen: list[tuple[int, Any]] = []
    whole = trainer_of(
        head,
        rows,
        tmp_path / "whole",
        **values,
        report=lambda figures, rates: seen.append((figures.step, (dict(figures.values), rates))),
    )
    whole.run()
    expected = dict(seen)
    assert len(expected) == whole.total == whole.progress.step >= 6
    some = (2, len(whole.steps_of(0)), whole.total - 1)  # within, and at the end of, an epoch
    for stop in range(1, whole.total) if everywhere else some:
        folder = tmp_path / f"broken{stop}"
        done: list[tuple[int, Any]] = []

        def note(figures: Any, rates: Any, done: list[Any] = done) -> None:
            done.append((figures.step, (dict(figures.values), rates)))

        with pytest.raises(Stopped):
            trainer_of(head, rows, folder, **values, stopping=after(stop), report=note).run()
        again = trainer_of(head, rows, folder, **values, report=note)
        again.resume(snapshots.read(last_of(folder)))
        assert again.progress.step == stop
        again.run()
        assert again.steps_run == whole.total - stop
        assert [step for step, _ in done] == list(range(1, whole.total + 1)), "each step once"
        assert dict(done) == expected, "losses, accuracies and learning rates are the same"
        assert whole.kept
        assert same(whole.kept, again.kept)
        ours, theirs = bytes_of(last_of(folder)), bytes_of(last_of(tmp_path / "whole"))
        del ours["state.json"], theirs["state.json"]  # which names the snapshot before
        assert ours == theirs


def test_more_epochs_go_on_where_fewer_ended(
    head: Path, rows: tuple[Any, Any], tmp_path: Path
) -> None:
    steady = {"scheduler": "constant", "warmup_steps": 2}
    short = trainer_of(head, rows, tmp_path, epochs=1, **steady)
    short.run()
    more = trainer_of(head, rows, epochs=2, **steady)
    more.resume(snapshots.read(last_of(tmp_path)))
    more.run()
    assert more.steps_run == more.total - short.total > 0
    whole = trainer_of(head, rows, epochs=2, **steady)
    whole.run()
    assert whole.kept
    assert same(whole.kept, more.kept)


def test_counters_and_moments_are_kept_as_they_are(
    head: Path, rows: tuple[Any, Any], tmp_path: Path
) -> None:  # TRN-12
    trainer = trainer_of(head, rows, tmp_path / "s", epochs=1)
    trainer.run()
    state = trainer._optimizer.state()
    for name, value in state.items():
        if name.endswith("/step"):
            value.fill_(301)  # bf16 has no such number
    trainer.save()
    other = trainer_of(head, rows, epochs=1)
    other.resume(snapshots.read(last_of(tmp_path / "s")))
    restored = other._optimizer.state()
    assert {float(v) for n, v in restored.items() if n.endswith("/step")} == {301.0}
    assert same(state, restored)
    assert {str(value.dtype) for value in restored.values()} == {"torch.float32"}


@pytest.mark.parametrize("name", ["optimizer.safetensors", "rng.safetensors", "state.json"])
def test_a_snapshot_that_lacks_a_file_is_refused(
    head: Path, rows: tuple[Any, Any], tmp_path: Path, name: str
) -> None:  # TRN-09
    trainer_of(head, rows, tmp_path, epochs=1).run()
    (last_of(tmp_path) / name).unlink()
    with pytest.raises(BadSnapshot, match="is not whole"):
        snapshots.read(last_of(tmp_path))


@pytest.mark.parametrize(
    ("scheduler", "warmup", "expected"),
    [
        ("linear", 4, [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        ("constant", 2, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("none", 0, [1.0] * 8),
    ],
)
def test_rates_are_a_function_of_the_step(
    scheduler: str, warmup: int, expected: list[float]
) -> None:
    assert [factor(scheduler, n, warmup, 8) for n in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_schedules_are_those_of_transformers(name: str) -> None:
    import transformers

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    make = getattr(transformers, f"get_{name}_schedule_with_warmup")
    theirs = make(optimizer, num_warmup_steps=7, num_training_steps=50)
    for step in range(50):
        assert factor(name, step, 7, 50) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_who_reads_ahead_is_placement(head: Path, rows: tuple[Any, Any]) -> None:
    kept = []
    for workers in (0, 2):
        trainer = trainer_of(head, rows, epochs=1, loader_workers=workers)
        trainer.run()
        kept.append(trainer.kept)
    assert same(*kept)


# Large enough that products and sums are split over threads.
PROGRAM = """
import tempfile
from pathlib import Path
import trainings, torch
trainings.HIDDEN, trainings.VOCAB, trainings.DRAFT_VOCAB = 384, 4096, 2048
trainings.CONFIG.update(hidden_size=384, num_attention_heads=6, num_key_value_heads=6,
                     v_head_dim=64,
                     intermediate_size=1152, vocab_size=4096)
from kimi_eagle.draft.compute import seed_everything
from kimi_eagle.identity import digest_bytes
folder = Path(tempfile.mkdtemp())
rows = trainings.random_rows(folder / "rows", [230, 170, 200, 310, 90, 400])
head = trainings.write_head(folder / "head")
for optimizer, deterministic in (("adamw", True), ("muon", False)):
    params = trainings.params_of(batch_tokens=512, epochs=1, lr=1e-3, optimizer=optimizer,
                              deterministic=deterministic)
    seed_everything(params)
    data = [trainings.data_of(*rows, params, part) for part in (range(5), [5])]
    trainer = trainings.new_trainer(head, params, *data)
    trainer.run()
    weights = (tensor.view(torch.uint8).numpy().tobytes() for tensor in trainer.kept.values())
    print(optimizer, digest_bytes(b"".join(weights)))
"""


@pytest.mark.slow
def test_bytes_do_not_follow_the_cores_of_the_machine() -> None:
    """Bitwise on a CPU: one core or all, whatever OMP_NUM_THREADS says."""
    found = []
    for threads, own in (("1", CORES[:1]), ("3", CORES)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                **Train.settings,
                "OMP_NUM_THREADS": threads,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            preexec_fn=lambda own=own: os.sched_setaffinity(0, own),
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines()[-2:])
    assert found[0] == found[1]
    assert {line.split()[0] for line in found[0]} == {"adamw", "muon"}


def test_a_step_of_two_batches_has_the_gradient_of_both_together(
    head: Path, rows: tuple[Any, Any]
) -> None:
    """Positions weigh the same wherever they are packed: two batches of 64 are one of 128."""
    one = params_of(precision="fp32", batch_tokens=128)
    two = params_of(precision="fp32", batch_tokens=64)
    found = []
    for params, batches in ((one, [(0, 1, 2, 3)]), (two, [(0, 1), (2, 3)])):
        from kimi_eagle.draft.packing import step as step_of

        data = data_of(*rows, params, TRAIN)
        model = new_model(head, params)
        parts = parts_of(model, params)
        step = step_of(data.items, 0, batches)
        for numbers in step.batches:
            batch = data.loader.load(numbers, 0)
            parts.heads(parts.unroll(batch), batch, step.supervised)[0].backward()
        found.append({name: item.grad for name, item in trained(model).items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_stops_with_its_step_and_rows(
    head: Path, rows: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = trainer_of(head, rows, tmp_path)
    steps = trainer.steps_of(0)
    poisoned = steps[1].rows()[0]
    loader = trainer._train.loader
    load = loader._row

    def bad(number: int, epoch: int) -> Any:
        aux, *rest = load(number, epoch)
        return (aux * float("nan") if number == poisoned else aux, *rest)

    loader._row = bad  # type: ignore[method-assign]
    with pytest.raises(Diverged, match="step 2 \\(epoch 1\\): the loss is not finite") as caught:
        trainer.run()
    assert all(trainer._train.items[n].key[:12] in str(caught.value) for n in steps[1].rows())
    assert not list(tmp_path.iterdir()), "nothing of it was saved"


def test_more_right_than_there_are_is_refused() -> None:
    with pytest.raises(Impossible, match="5 of 4 positions right"):
        values_of([1.0], [5.0], [4.0], [4])
    assert values_of([1.0, 0.5], [3.0, 1.0], [4.0, 2.0], [4, 4]) == {
        "loss": 1.5,
        "loss_0": 1.0,
        "loss_1": 0.5,
        "full_acc_0": 0.75,
        "cond_acc_0": 0.75,
        "full_acc_1": 0.25,
        "cond_acc_1": 0.5,
    }


def test_another_head_than_the_verifiers_is_refused(head: Path, rows: tuple[Any, Any]) -> None:
    model = new_model(head, params_of())
    digests = prove_frozen(model, head, vocab_map())
    assert set(digests) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        before = part.weight.data.clone()
        part.weight.data[..., 0] += 1
        with pytest.raises(BadStart, match="is not what head/model"):
            prove_frozen(model, head, vocab_map())
        part.weight.data = before
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(BadStart, match="lm_head of the draft would be trained"):
        prove_frozen(model, head, vocab_map())


def test_a_norm_that_is_left_out_is_seen(head: Path, rows: tuple[Any, Any]) -> None:  # TRN-16
    params = params_of(precision="fp32")
    model = new_model(head, params)
    batch = data_of(*rows, params, TRAIN).loader.load((0, 1), 0)
    parts = parts_of(model, params)
    found = probe(batch, parts.heads, head, vocab_map(), 1e-5)
    assert found.aims == 1.0
    assert found.positions == len(batch.starts[0])
    assert 0 <= found.next_token <= 1
    model.verifier_norm = torch.nn.Identity()
    model.verifier_norm.weight = torch.ones(1)
    batch.last_states.add_(0.5)
    assert probe(batch, parts.heads, head, vocab_map(), 1e-5).aims < 0.97
