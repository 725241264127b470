"""Blocks of the verifier's cache that hidden states fit into without being cut into crumbs."""

from __future__ import annotations

import json
from math import gcd
from pathlib import Path

import pytest
from conftest import DEMO

from kimi_eagle.engines.cache_blocks import ENOUGH, block_tokens, even_block
from kimi_eagle.verifiers.facts import read_facts

SMOLLM2, LLAMA_8B = (768, 4608), (4096, 4 * 4096 * 2)


@pytest.mark.parametrize(
    ("verifier", "tokens", "states"),
    [(SMOLLM2, 384, 64), (LLAMA_8B, 512, 64), ((512, 512), 64, 64)],
)
def test_a_block_of_states_divides_one_of_keys_and_values(
    verifier: tuple[int, int], tokens: int, states: int
) -> None:
    attention_bytes, states_bytes = verifier
    assert even_block(attention_bytes, states_bytes) == tokens
    # As vLLM 0.26 sizes it.
    assert tokens * attention_bytes // states_bytes == states


def test_whatever_the_sizes_no_multiple_of_sixteen_hashes_in_larger_steps() -> None:
    for attention_bytes in range(64, 4096, 416):
        for states_bytes in range(attention_bytes, 40 * attention_bytes, 7 * attention_bytes // 3):
            steps = {
                tokens: min(gcd(tokens, max(tokens * attention_bytes // states_bytes, 1)), ENOUGH)
                for tokens in range(16, 1025, 16)
            }
            found = even_block(attention_bytes, states_bytes)
            assert steps[found] == max(steps.values())
            assert all(step < steps[found] for tokens, step in steps.items() if tokens < found)


def test_the_demos_latents_leave_it_to_vllm() -> None:
    config = json.loads(Path(DEMO / "verifier" / "config.json").read_text("utf-8"))
    assert block_tokens(read_facts(config), 640, 1) is None
