"""How many tokens a block of the verifier's cache holds while hidden states are extracted.

Where a verifier has keys and values by head, vLLM gives hidden states blocks of their own: as many
bytes as a block of keys and values of one layer, so fewer tokens, rounded down. It then hashes each
request in steps of what divides both, though nothing is looked up by these hashes. With its own 16
tokens a block of SmolLM2's states holds two: a row of 1,000 tokens is 500 blocks and 500 hashes.
They take 0.7 ms of a CPU, where the row itself takes 1 ms of an H200.
"""

from __future__ import annotations

from math import gcd

from kimi_eagle.verifiers.facts import VerifierFacts

# Beyond this many tokens a step, hashing is nothing beside running the verifier.
ENOUGH = 64
MULTIPLE, MOST = 16, 1024


def block_tokens(facts: VerifierFacts, states_bytes: int, tensor_parallel: int) -> int | None:
    """Tokens of a block to ask vLLM for on a GPU; None leaves it to vLLM.

    Args:
        states_bytes: hidden states of one token, all layers, as the engine holds them.
    """
    if facts.mla:
        return None  # states share the blocks of the latents, whatever their size
    heads = max(facts.num_kv_heads // tensor_parallel, 1)
    return even_block(2 * 2 * heads * facts.head_dim, states_bytes)


def even_block(attention_bytes: int, states_bytes: int) -> int:
    """The smallest block of which a hashing step is `ENOUGH`, or else the one of the largest step.

    Args:
        attention_bytes: keys and values of one token and layer, bfloat16, on one GPU.
    """

    def step(tokens: int) -> int:
        return gcd(tokens, max(tokens * attention_bytes // states_bytes, 1))

    return max(range(MULTIPLE, MOST + 1, MULTIPLE), key=lambda tokens: min(step(tokens), ENOUGH))
