"""The simulator: the draft's own forward pass against speculators', chains against chains grown
token by token, and the walk against answers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import LAYERS, write_draft
from hypothesis import given
from hypothesis import strategies as st

from kimi_eagle.draft.eagle3 import Eagle3, UnknownDraft, rope_frequencies
from kimi_eagle.draft.reading import draft_config, read_draft
from kimi_eagle.draft.simulator import next_tokens, proposals
from kimi_eagle.draft.walk import Steps, answers, walk


@pytest.fixture(scope="module", params=[{}, {"layers": 2}, {"kv_heads": 1}], ids=str)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("simulated"), **request.param)


def _row(length: int = 12) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 64, (length,), generator=generator)
    return tokens, torch.randn(length, len(LAYERS), 8, generator=generator).to(torch.bfloat16)


def _wide(draft: Eagle3) -> Eagle3:
    """The same draft in float32, where two ways to reckon the same sum hardly differ."""
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in draft._t.items()}
    return Eagle3(draft.config, tensors)


def test_the_forward_pass_is_that_of_speculators(folder: Path) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float()
    draft = _wide(read_draft(folder))
    model.load_state_dict(draft._t, strict=False)
    tokens, states = _row()
    given_states = states.float()[:-1].flatten(1)
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output[0].detach()))
    with torch.inference_mode():
        model(
            given_states[None],
            tokens[None, 1:],
            torch.zeros(1, len(tokens) - 1, dtype=torch.long),
            ttt_steps=1,
        )
        state, _ = draft.read(tokens[1:], draft.combine(given_states))
        ours = draft.logits(state)
    assert torch.allclose(ours, seen[0], atol=1e-4, rtol=1e-3)


def test_chains_of_all_positions_at_once_are_those_grown_one_by_one(folder: Path) -> None:
    """Serving drafts from one position at a time, over a row that ends there."""
    draft = _wide(read_draft(folder))
    tokens, states = _row()
    starts = torch.tensor([1, 6, 11])
    with torch.inference_mode():
        together = proposals(draft, states.float(), tokens, starts, 4)
        for start, chain in zip(starts.tolist(), together.tolist(), strict=True):
            assert chain == _grown(draft, states.float()[:start], tokens[: start + 1], 4)


def _grown(draft: Eagle3, states: Any, tokens: Any, number: int) -> list[int]:
    """Draft tokens from the last position, every pass over the whole sequence again: what a server
    without a cache would do."""
    hidden = draft.combine(states.flatten(1))
    ids = tokens[1:]
    found: list[int] = []
    for _ in range(number):
        state, _ = draft.read(ids, hidden)
        found.append(int(draft.proposed(state[-1:])))
        ids = torch.cat([ids, torch.tensor(found[-1:])])
        hidden = torch.cat([hidden, state[-1:]])
    return found


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 50000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}",
)
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:  # EXP-05
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=128, rope_parameters=dict(rope), max_position_embeddings=262144)
    )
    ours, scale = rope_frequencies(rope, 128)
    assert torch.allclose(ours, theirs.inv_freq, rtol=1e-6)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_an_unknown_rotary_scaling_is_refused() -> None:
    with pytest.raises(UnknownDraft, match="longrope"):
        rope_frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 64)


def test_a_decoder_of_another_kind_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["transformer_layer_config"]["model_type"] = "qwen3"
    with pytest.raises(UnknownDraft, match="qwen3"):
        draft_config(config)


def test_a_sliding_window_hides_what_lies_before_it(folder: Path) -> None:
    from dataclasses import replace

    whole = _wide(read_draft(folder))
    windows = (3,) * whole.config.layers
    draft = Eagle3(replace(whole.config, windows=windows), whole._t)
    tokens, states = _row()
    with torch.inference_mode():
        together = proposals(draft, states.float(), tokens, torch.tensor([11]), 4)
        assert together[0].tolist() == _grown(draft, states.float()[:11], tokens, 4)


def test_the_verifiers_next_token_is_of_the_normed_state() -> None:
    norm, lm_head = torch.tensor([1.0, 4.0]), torch.eye(2)
    last = torch.tensor([[3.0, 1.0], [5.0, 1.0]])
    assert next_tokens(last, norm, lm_head, 1e-6).tolist() == [1, 0]


# The walk


def test_answers_are_what_follows_a_prompt() -> None:
    assert answers([0, 0, 1, 1, 1, 0, 1]) == [(2, 5), (6, 7)]
    assert answers([1, 1, 0, 1]) == [(3, 4)]  # nothing was asked before the first
    assert answers([0, 1, 1, 1], 2) == [(1, 3)]
    assert answers([0, 0]) == []


def _walked(tokens: list[int], own: list[int], chains: dict[int, list[int]], k: int = 3) -> Steps:
    steps = Steps(k)
    walk(steps, tokens, (1, len(tokens)), chains, own)
    return steps


def test_a_step_commits_what_is_accepted_and_the_bonus_token() -> None:
    # After 6: 7 and 8 are right, 0 is not, 9 is the bonus; after 9: 10 and 11 end the answer.
    steps = _walked(
        [5, 6, 7, 8, 9, 10, 11], [0, 7, 8, 9, 10, 11, 0], {1: [7, 8, 0], 4: [10, 11, 12]}
    )
    assert steps.committed == [[3, 2]]
    assert (steps.tried, steps.accepted) == ([2, 2, 1], [2, 2, 0])
    assert steps.acceptance_length == 2.5


def test_nothing_past_the_first_rejection_counts_in_a_walk() -> None:  # EVA-01
    steps = _walked([5, 6, 7, 8, 9], [0, 7, 8, 9, 0], {1: [7, 0, 9], 3: [0, 0, 0]})
    assert steps.committed == [[2, 1]]
    assert (steps.tried, steps.accepted) == ([2, 1, 0], [1, 0, 0])


def test_a_row_that_leaves_the_verifiers_path_is_not_followed_beyond() -> None:
    # The verifier would have said 70 after 6; the row says 7.
    steps = _walked([5, 6, 7, 8, 9], [0, 70, 8, 9, 0], {1: [70, 1, 2], 2: [8, 9, 3]})
    assert steps.committed == [[2]]
    assert steps.left_off == [1]
    # One accepted, the bonus, and what the other step's rates (place 1: 1 of 1) promise.
    assert steps.acceptance_length == pytest.approx((2 + 1 + 1 + 1.0) / 2)


def test_an_answer_of_one_token_takes_no_draft_step() -> None:  # EVA-08
    steps = _walked([5, 6], [0, 0], {})
    assert (steps.count, steps.acceptance_length, steps.rates) == (0, None, [None] * 3)


@given(st.data())
def test_steps_cover_the_answer_exactly(data: st.DataObject) -> None:
    """Every token after the first is committed by one step, where the row is the verifier's own."""
    length = data.draw(st.integers(2, 20))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
    own = [*tokens[1:], 0]
    chains = {
        at: data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)) for at in range(length)
    }
    steps = _walked(tokens, own, chains)
    assert sum(steps.committed[0]) == length - 2
    assert all(1 <= count <= 4 for count in steps.committed[0])
    assert not steps.left_off
