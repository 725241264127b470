"""The proof of the layer convention, on a head small enough to know every answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kimi_eagle.engines.probe import Probe
from kimi_eagle.job import StageFailed

VOCAB, HIDDEN, LAYERS, EPS = 97, 32, 4, 1e-5
IDS = (2, 4, 5, 8)
Head = Mapping[str, Sequence[str]]


def _head(folder: Path, norm: Any) -> Head:
    generator = torch.Generator().manual_seed(1)
    path = folder / "head.safetensors"
    save_file(
        {
            "norm": norm.to(torch.bfloat16),
            "lm_head": torch.randn(VOCAB, HIDDEN, generator=generator).to(torch.bfloat16),
        },
        path,
    )
    return {"model.norm.weight": (str(path), "norm"), "lm_head.weight": (str(path), "lm_head")}


@pytest.fixture
def head(tmp_path: Path) -> Head:
    """One whose norm has a weight of its own in every channel."""
    return _head(tmp_path, torch.linspace(0.2, 3.0, HIDDEN))


def _states(positions: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.5, 4.0, positions)[:, None, None]
    return (torch.randn(positions, LAYERS, HIDDEN, generator=generator) * scale).bfloat16()


def _normed(head: Head, states: Any) -> Any:
    from safetensors.torch import load_file

    weight = load_file(head["model.norm.weight"][0])["norm"].float()
    x = states.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight).bfloat16()


def _next(head: Head, last: Any) -> list[int]:
    """What a verifier with this head goes on with, after last states before the norm."""
    from safetensors.torch import load_file

    lm_head = load_file(head["lm_head.weight"][0])["lm_head"]
    found: list[int] = (_normed(head, last) @ lm_head.T).argmax(-1).tolist()
    return found


def _probe(head: Head, rows: Sequence[tuple[Any, list[int]]]) -> Probe:
    probe = Probe(head, EPS, IDS)
    for states, tokens in rows:
        probe.add(states, tokens)
    return probe


def test_states_of_the_convention_pass_and_the_next_best_is_far(head: Head) -> None:
    rows = [(states, _next(head, states[:, -1])) for states in (_states(60), _states(40, 1))]
    probe = _probe(head, rows)
    probe.require(0.97)
    probe.require_best()
    assert (probe.agreement, probe.count) == (1.0, 100)
    found = probe.next_best
    assert found is not None
    assert found["agreement"] < 0.9
    # The nearest one is the same states without the norm's weights.
    assert found["convention"] == (
        "layer slot 3 (layer 8) is the last layer's, after the final norm already"
    )


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_another_slot_that_is_the_last_layer_is_named(head: Head, slot: int) -> None:
    states = _states(100)
    probe = _probe(head, [(states, _next(head, states[:, slot]))])
    with pytest.raises(StageFailed) as refused:
        probe.require(0.97)
    assert "at only " in str(refused.value)
    assert (
        f"What fits instead: layer slot {slot} (layer {IDS[slot]}) is the last layer's, before "
        "the final norm (100.0% of 100 positions" in str(refused.value)
    )
    with pytest.raises(StageFailed, match=rf"if layer slot {slot} \(layer {IDS[slot]}\)"):
        probe.require_best()


def test_states_after_the_final_norm_are_refused(head: Head) -> None:
    states = _states(100)
    tokens = _next(head, states[:, -1])
    states[:, -1] = _normed(head, states[:, -1])
    probe = _probe(head, [(states, tokens)])
    for require in (lambda: probe.require(0.97), probe.require_best):
        with pytest.raises(StageFailed, match="are after the final norm"):
            require()


def test_they_are_refused_too_where_the_argmax_cannot_tell(tmp_path: Path) -> None:
    """A norm of one weight throughout changes no argmax."""
    head = _head(tmp_path, torch.full((HIDDEN,), 1.5))
    states = _states(100)
    tokens = _next(head, states[:, -1])
    _probe(head, [(states, tokens)]).require(0.97)
    states[:, -1] = _normed(head, states[:, -1])
    probe = _probe(head, [(states, tokens)])
    assert probe.agreement > 0.97
    with pytest.raises(StageFailed, match="mean square is 1 at 100 of 100 positions"):
        probe.require(0.97)


def test_axes_that_lie_in_another_order_are_named(head: Head) -> None:
    """EXT-08: the shape is right, what lies there is layer-major."""
    states = _states(100)
    tokens = _next(head, states[:, -1])
    layer_major = states.transpose(0, 1).contiguous().view(100, LAYERS, HIDDEN)
    hidden_before = states.transpose(1, 2).contiguous().view(100, LAYERS, HIDDEN)
    for given, order in (
        (layer_major, "layers,tokens,hidden"),
        (hidden_before, "tokens,hidden,layers"),
    ):
        with pytest.raises(StageFailed, match=rf"What fits instead: .*the order {order}"):
            _probe(head, [(given, tokens)]).require(0.97)


@pytest.mark.parametrize(("moved", "where"), [(1, "before"), (-1, "after")])
def test_states_of_the_neighbouring_position_are_named(head: Head, moved: int, where: str) -> None:
    states = _states(101)
    tokens = _next(head, states[:, -1])
    given = states.roll(moved, 0)
    with pytest.raises(StageFailed, match=f"each state belongs to the position {where} its own"):
        _probe(head, [(given, tokens)]).require(0.97)


def test_when_nothing_fits_that_is_said(head: Head) -> None:
    states = _states(100)
    tokens = _next(head, _states(100, 5)[:, 0])
    with pytest.raises(StageFailed, match="No other convention fits either; the next best"):
        _probe(head, [(states, tokens)]).require(0.97)


@pytest.mark.parametrize(
    ("positions", "wrong", "passes"),
    [(400, 12, True), (400, 13, False), (20, 3, True), (20, 4, False), (4, 0, True), (4, 1, False)],
)
def test_few_positions_may_hold_a_tie(head: Head, positions: int, wrong: int, passes: bool) -> None:
    states = _states(positions)
    tokens = _next(head, states[:, -1])
    tokens[:wrong] = [(token + 1) % VOCAB for token in tokens[:wrong]]
    probe = _probe(head, [(states, tokens)])
    assert probe.agreement == 1 - wrong / positions
    if passes:
        probe.require(0.97)
    else:
        with pytest.raises(StageFailed, match="min_agreement 97%"):
            probe.require(0.97)


def test_text_that_people_wrote_agrees_now_and_then_and_passes(head: Head) -> None:
    states = _states(100)
    tokens = [
        token if number % 3 == 0 else (token + 1 + number) % VOCAB
        for number, token in enumerate(_next(head, states[:, -1]))
    ]
    probe = _probe(head, [(states, tokens)])
    probe.require_best()
    with pytest.raises(StageFailed):
        probe.require(0.97)


def test_no_position_proves_nothing(head: Head) -> None:
    with pytest.raises(StageFailed, match="no position was probed"):
        _probe(head, []).require(0.97)


def test_states_and_tokens_of_different_lengths_are_a_mistake_of_the_caller(head: Head) -> None:
    with pytest.raises(ValueError, match="for 2 next tokens"):
        _probe(head, []).add(_states(3), [1, 2])
