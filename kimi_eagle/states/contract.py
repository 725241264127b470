"""The layer contract: what a stored hidden state *is*. Pure.

Layer ids count the input embeddings as 0 (transformers' `hidden_states[i]`, vLLM's and
speculators' ids): id i is the output of the i-th decoder layer. The last id, n, is the output of
the last decoder layer *before* the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kimi_eagle.verifiers.facts import VerifierFacts

CONVENTION = "embeddings-are-0/last-before-final-norm"
AXES = "tokens,layers,hidden"
IMPORTED = "imported"
BF16, FP8 = "bfloat16", "fp8"


@dataclass(frozen=True)
class LayerContract:
    """Of states of shape [tokens, len(layers), hidden]."""

    layers: tuple[int, ...]
    """Aux layer ids ascending, then the id of the last layer."""
    hidden_size: int
    dtype: str
    """`bfloat16`; or `fp8`: e4m3, and an fp32 scale for each token and layer (see `states.fp8`)."""
    numerics: str
    """The engine kind whose arithmetic made them: `vllm`, `transformers`; or `imported`."""
    convention: str = CONVENTION
    axes: str = AXES
    """The order of the axes: where two of them have the same length, nothing else can tell."""

    def document(self) -> dict[str, Any]:
        """The contract as it enters row keys and shard metadata."""
        return {**asdict(self), "layers": list(self.layers)}

    @staticmethod
    def of(document: Mapping[str, Any]) -> LayerContract:
        """The contract that a document says."""
        return LayerContract(**{**document, "layers": tuple(document["layers"])})

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in the store, but for its id."""
        return self.states_bytes_per_token + self.scales_bytes_per_token

    @property
    def engine_bytes_per_token(self) -> int:
        """What a token's states take as an engine gives them: bfloat16."""
        return len(self.layers) * self.hidden_size * 2

    @property
    def states_bytes_per_token(self) -> int:
        """What a token's states take in the store, without their scales."""
        return (
            self.engine_bytes_per_token // 2 if self.dtype == FP8 else self.engine_bytes_per_token
        )

    @property
    def scales_bytes_per_token(self) -> int:
        """What the scales of a token's states take."""
        return 4 * len(self.layers) if self.dtype == FP8 else 0


def contract_of(params: Any, facts: VerifierFacts) -> LayerContract:
    """The contract of what a stage that makes states makes (`extract`, `import_states`).

    Raises:
        VerifierError: aux layers that the verifier does not have.
    """
    return LayerContract(
        layers=(*facts.aux_layers(params.layers), facts.num_layers),
        hidden_size=facts.hidden_size,
        dtype=params.dtype,
        numerics=params.engine.kind if params.kind == "extract" else IMPORTED,
    )
