"""What stages take besides hidden states: their files on the disk, and GPU memory of the weights.

states: about 74.3 GB of weights on each of 8 GPUs, of 126.9 GB that the engine may use of each
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kimi_eagle.draft.architecture import decoder_config
from kimi_eagle.stages.train.spec import Keep, TrainParams
from kimi_eagle.terminal import human_size
from kimi_eagle.verifiers.facts import VerifierError, VerifierFacts
from kimi_eagle.verifiers.folder import VerifierFolder, tensor_files
from kimi_eagle.verifiers.weights import weight_bytes

# A row of `rows.table`: ids and mask for a token; its place, split and origin.
_BYTES_OF_TOKEN, _BYTES_OF_ROW = 5, 25
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Weights:
    """An engine's weights, and the GPUs that share them."""

    bytes: int
    gpus: int
    bytes_per_gpu: int
    usable_bytes: int | None
    """What the engine may use of each GPU; None where nobody says how much they have."""
    basis: str
    trouble: str | None = None
    """Why they do not fit."""

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def says(self) -> str:
        each = "on one GPU" if self.gpus == 1 else f"on each of {self.gpus} GPUs"
        said = f"about {human_size(self.bytes_per_gpu)} of weights {each} ({self.basis})"
        if self.usable_bytes is None:
            return f"{said}; how much memory those have is not known (--gpu-memory)"
        return f"{said}, of {human_size(self.usable_bytes)} that the engine may use"


def on_gpus(params: Any) -> bool:
    """Whether a stage starts vLLM on GPUs, as far as the manifest says."""
    engine = getattr(params, "engine", None)
    shared = getattr(engine, "tensor_parallel", None)
    served = getattr(engine, "endpoint", None) is not None
    return shared is not None and not served and (shared > 1 or params.resources.gpus > 0)


def engine_weights(
    stages: Mapping[str, Any], folder: VerifierFolder, gpu_bytes: int | None
) -> dict[str, Weights]:
    """What the verifier's weights take where `stages` run it, if their size is known.

    Args:
        stages: parameters by name, of those that `on_gpus` is true of.
        gpu_bytes: memory of one GPU, where that is known.
    """
    size, basis = _verifier(folder)
    if size is None:
        return {}
    found = {}
    for name, params in stages.items():
        engine, gpus = params.engine, params.engine.tensor_parallel
        share = engine.gpu_memory_utilization
        usable = None if gpu_bytes is None else int(gpu_bytes * share)
        weights = Weights(size, gpus, -(-size // gpus), usable, basis)
        found[name] = replace(weights, trouble=_trouble(weights, share))
    return found


def _trouble(weights: Weights, share: float) -> str | None:
    if weights.usable_bytes is None or weights.bytes_per_gpu < weights.usable_bytes:
        return None
    return (
        f"its weights do not fit: {weights.says()} (gpu_memory_utilization {share:g}); give "
        "`engine.tensor_parallel` more GPUs, or take GPUs with more memory"
    )


def _verifier(folder: VerifierFolder) -> tuple[int | None, str]:
    """Bytes of a verifier's weights, and what that goes by."""
    if folder.has_weights:
        try:
            files = set(tensor_files(folder.path).values())
            return sum((folder.path / name).stat().st_size for name in files), "its files"
        except (VerifierError, OSError):
            pass  # whoever reads them says what is wrong
    try:
        config = json.loads((folder.path / "config.json").read_text("utf-8"))
        return weight_bytes(folder.facts, config), "an estimate from config.json"
    except (OSError, ValueError):
        return None, ""


def head_bytes(facts: VerifierFacts) -> int:
    """The three tensors of training, in bf16."""
    return (2 * facts.vocab_size + 1) * facts.hidden_size * _BF16


def rows_bytes(rows: int | None, tokens: int) -> int:
    return _BYTES_OF_TOKEN * tokens + _BYTES_OF_ROW * (rows or 0)


def training_bytes(
    params: TrainParams, facts: VerifierFacts, aux_layers: int, draft_vocab: int
) -> int:
    """The checkpoint, and what is saved on the way at the same time: weights and the two moments of
    the optimizer in fp32, and the best epoch's weights in bf16."""
    decoder = decoder_config(params.draft, facts)
    hidden = facts.hidden_size
    width, heads, kv, inner = (
        int(decoder[name])
        for name in ("head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    # The first layer's attention takes the embedding beside the state.
    attention = width * (2 * hidden * (heads + 2 * kv) + heads * hidden)
    layer = attention + 3 * hidden * inner
    trained = aux_layers * hidden * hidden + params.draft.layers * layer + draft_vocab * hidden
    checkpoint = _BF16 * (trained + facts.vocab_size * hidden)
    keep = params.keep if isinstance(params.keep, Keep) else Keep()
    saved = keep.last + keep.best
    return checkpoint + saved * (3 * _FP32 + _BF16) * trained
