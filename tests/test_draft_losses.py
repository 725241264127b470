"""The unrolled draft and its losses: what speculators computes, and where we differ on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("speculators", reason="needs the extra cpu or gpu")

from trainings import data_of, new_model, params_of, parts_of, random_rows, write_head

from kimi_eagle.draft.model import trained
from kimi_eagle.draft.packing import step as step_of

LENGTHS = [23, 17, 20]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("loss") / "head")


def upstream_batch(rows: Any, states: Any, size: int) -> dict[str, Any]:
    """The same rows through speculators' own collation."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    samples = []
    for number in range(len(rows)):
        held, ids = states.read(type("At", (), {"start": number}))
        samples.append(
            {
                "hidden_states": held[:, :-1].flatten(1),
                "verifier_last_hidden_states": held[:, -1],
                "input_ids": ids.long(),
                "loss_mask": torch.from_numpy(rows.mask(number).copy()).bool(),
                "lengths": torch.tensor([len(ids)]),
                "position_ids": torch.arange(len(ids)),
            }
        )
    found = CollateFn(size, held.shape[-1], held.shape[1] - 1, preprocess=shift_batch)(samples)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def both(head: Path, tmp_path: Path, **values: Any) -> tuple[Any, ...]:
    """(our loss, gradients, tally; theirs, gradients, metrics) on the same model and rows."""
    from speculators.losses import resolve_loss_config

    params = params_of(**values)
    rows, states = random_rows(tmp_path / "rows", LENGTHS)
    data = data_of(rows, states, params, range(len(rows)))
    batch = data.loader.load((0, 1, 2), 0)
    step = step_of(data.items, 0, [(0, 1, 2)])
    model = new_model(head, params)
    dtype = torch.bfloat16 if params.precision == "bf16" else torch.float32
    given = upstream_batch(rows, states, params.batch_tokens)
    if dtype == torch.float32:
        for name in ("hidden_states", "verifier_last_hidden_states"):
            given[name] = given[name].float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, theirs, metrics = model(
            **given,
            ttt_steps=params.ttt_steps,
            ttt_step_loss_decay=params.ttt_step_loss_decay,
            loss_config=resolve_loss_config(params.loss, "eager"),
        )
    theirs.backward()
    their_gradients = {name: item.grad.clone() for name, item in trained(model).items()}
    model.zero_grad(set_to_none=True)
    parts = parts_of(model, params, chunk=7)
    ours, tally = parts.heads(parts.unroll(batch), batch, step.supervised)
    ours.backward()
    our_gradients = {name: item.grad for name, item in trained(model).items()}
    return ours, our_gradients, tally, theirs, their_gradients, metrics, step


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="default"),
        pytest.param({"loss": "ce", "attention": "sdpa"}, id="ce, sdpa"),
        pytest.param({"ttt_step_loss_decay": 0.8, "ttt_steps": 4}, id="decay, four steps"),
        pytest.param({"draft": {"layers": 2, "kv_heads": 2}}, id="two layers, grouped heads"),
        pytest.param({"draft": {"sliding_window": 5}}, id="sliding window"),
        *(
            pytest.param({"loss": name, "ttt_steps": 2}, id=name)
            for name in ("rkl", "jsd", "tv", "nla", "lk_hybrid")
        ),
        pytest.param({"draft": {"norm_before_residual": True}}, id="norm before residual"),
    ],
)
def test_loss_and_gradients_are_those_of_speculators(
    head: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """In fp32: within 2e-5 of the loss, and of each gradient's largest element."""
    ours, own, tally, theirs, other, metrics, step = both(
        head, tmp_path, precision="fp32", **values
    )
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=2e-5)
    assert set(own) == set(other)
    for name, gradient in other.items():
        most = float(gradient.abs().max())
        assert most > 0, name
        assert float((own[name] - gradient).abs().max()) <= 2e-5 * most, name
    for k in range(len(step.supervised)):
        assert float(tally.loss[k]) == pytest.approx(float(metrics[f"loss_{k}_sum"]), rel=2e-5)
        assert step.supervised[k] == int(metrics[f"full_acc_{k}_total"])
        assert int(tally.correct[k]) == int(metrics[f"full_acc_{k}_sum"])


def test_in_bf16_they_differ_by_its_rounding_alone(head: Path, tmp_path: Path) -> None:
    """bf16 keeps 8 bits: 1 % of the loss, 4 % of a gradient's norm."""
    ours, own, _, theirs, other, _, _ = both(head, tmp_path)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-2)
    for name, gradient in other.items():
        assert float((own[name] - gradient).norm()) <= 0.04 * float(gradient.norm()), name


def test_every_attention_is_the_same_one(head: Path, tmp_path: Path) -> None:
    """What a GPU runs, on a CPU: the own keys of later steps join the softmax afterwards; row by
    row, they are columns of it."""
    found = []
    params = params_of(precision="fp32", draft={"kv_heads": 2})
    rows, states = random_rows(tmp_path / "rows", LENGTHS)
    batch = data_of(rows, states, params, range(3)).loader.load((0, 1, 2), 0)
    model = new_model(head, params)
    for attention in ("flex", "eager", "sdpa"):
        unroll = parts_of(model, params_of(precision="fp32", attention=attention)).unroll
        with torch.no_grad():
            found.append(unroll(batch))
    real = batch.document_ids >= 0
    for step, (flex, eager, dense) in enumerate(zip(*found, strict=True)):
        real[len(real) - step :] = False
        torch.testing.assert_close(flex[real], dense[real], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(eager[real], dense[real], atol=2e-5, rtol=2e-5)


def test_no_target_is_of_another_row(head: Path, tmp_path: Path) -> None:
    """A row that is supervised from its first token: speculators pairs the end of the row before
    it with it; here each row's loss is its own, whatever lies beside it."""
    params = params_of(precision="fp32")
    rows, states = random_rows(tmp_path / "rows", LENGTHS)
    rows.loss_mask[:] = 1
    data = data_of(rows, states, params, range(3))
    model = new_model(head, params)
    parts = parts_of(model, params)

    def loss(batch: tuple[int, ...]) -> float:
        packed = data.loader.load(batch, 0)
        totals = (1, 1, 1)
        with torch.no_grad():
            return float(parts.heads(parts.unroll(packed), packed, totals)[0])

    assert loss((0, 1, 2)) == pytest.approx(loss((0,)) + loss((1,)) + loss((2,)), rel=1e-5)


def test_the_mask_is_shifted_with_its_inputs(tmp_path: Path) -> None:  # TRN-17
    params = params_of()
    rows, states = random_rows(tmp_path / "rows", [7])
    rows.loss_mask[:] = torch.tensor([0, 0, 0, 1, 1, 1, 0]).numpy()
    data = data_of(rows, states, params, [0])
    batch = data.loader.load((0,), 0)
    assert batch.loss_mask[:6].int().tolist() == [0, 0, 1, 1, 1, 0]
    assert batch.starts[0].tolist() == [2, 3, 4]  # T_start - 1, and three in all
    assert batch.starts[1].tolist() == [1, 2, 3]
    assert data.items[0].supervised == (3, 3, 3)
    assert batch.input_ids[:6].tolist() == rows.ids(0)[1:].tolist()
    held, _ = states.read(type("At", (), {"start": 0}))
    assert torch.equal(batch.hidden_states[:6], held[:-1, :-1].flatten(1))
    assert torch.equal(batch.last_states[:6], held[1:, -1])


def test_four_aux_layers_make_no_other_assumption(head: Path, tmp_path: Path) -> None:  # TRN-14
    from trainings import CONFIG, vocab_map

    from kimi_eagle.draft.model import build
    from kimi_eagle.verifiers.facts import read_facts

    params = params_of()
    rows, states = random_rows(tmp_path / "rows", [20], aux=4)
    model = build(params, read_facts(CONFIG), vocab_map(), head, [0, 1, 2, 4])
    parts = parts_of(model, params)
    batch = data_of(rows, states, params, [0]).loader.load((0,), 0)
    assert batch.hidden_states.dtype == torch.bfloat16
    loss, _ = parts.heads(parts.unroll(batch), batch, (15, 14, 13))
    assert torch.isfinite(loss)


def test_a_batch_without_supervision_is_an_error(tmp_path: Path) -> None:  # TRN-14
    rows, states = random_rows(tmp_path / "rows", [12])
    rows.loss_mask[:] = 0
    with pytest.raises(RuntimeError, match="no supervised position at all: rows 000000000000"):
        data_of(rows, states, params_of(), [0]).loader.load((0,), 0)
