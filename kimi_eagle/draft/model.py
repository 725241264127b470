"""speculators' draft model, made from the head artifact and a vocabulary map. Imports torch.

Its frozen parts come out of the verifier, and are proven to have: what was loaded is compared with
the file, and the record holds their digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file

from kimi_eagle.draft.architecture import decoder_config
from kimi_eagle.draft.checkpoint import CONFIG, WEIGHTS, check_checkpoint
from kimi_eagle.draft.vocab import VocabMap, check_map
from kimi_eagle.stages.train.spec import TrainParams
from kimi_eagle.verifiers.facts import VerifierFacts

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_FILE = "model.safetensors"


class BadStart(ValueError):
    """Training cannot start from what it is given; the message says why."""


def build(
    params: TrainParams, facts: VerifierFacts, vocab: VocabMap, head: Path, layers: Sequence[int]
) -> Any:
    """A draft with random weights drawn from the global generator, in fp32.

    Args: `layers`: the aux layer ids, input embeddings being 0.

    Raises:
        BadStart: the vocabulary is of another verifier.
    """
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig

    if vocab.verifier_size != facts.vocab_size:
        raise BadStart(
            f"the vocab artifact is for a verifier vocabulary of {vocab.verifier_size}, the head "
            f"has {facts.vocab_size}: they are of different verifiers"
        )
    decoder = decoder_config(params.draft, facts)
    decoder.pop("model_type")
    return Eagle3DraftModel.from_training_args(
        LlamaConfig(**decoder),
        t2d=vocab.t2d,
        d2t=vocab.d2t,
        draft_vocab_size=vocab.draft_size,
        norm_before_residual=params.draft.norm_before_residual,
        target_layer_ids=list(layers),
        ttt_steps=params.ttt_steps,
        verifier_name_or_path=str(head),
        # How the draft attends while it trains is ours; no other value of this needs a GPU.
        draft_attn_impl="sdpa",
    )


def prove_frozen(model: Any, head: Path, vocab: VocabMap) -> dict[str, str]:
    """Compare the model's frozen weights with the head artifact's; returns the digests of those.

    Raises:
        BadStart: a weight is not the verifier's.
    """
    digests = {}
    with safe_open(head / HEAD_FILE, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in (EMBEDDING, NORM, HEAD)}
    for name, tensor in stored.items():
        data = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
        digests[name] = blake3(data, max_threads=blake3.AUTO).hexdigest()
    rows = stored[HEAD] if vocab.t2d is None else stored[HEAD][vocab.t2d]
    for name, loaded, expected in (
        ("embed_tokens", model.embed_tokens.weight, stored[EMBEDDING]),
        ("lm_head", model.lm_head.weight, rows),
        ("verifier_lm_head", model.verifier_lm_head.weight, rows),
        ("verifier_norm", model.verifier_norm.weight, stored[NORM]),
    ):
        if not torch.equal(loaded.detach().cpu(), expected.to(loaded.dtype)):
            raise BadStart(
                f"{name} of the draft is not what {head.name}/{HEAD_FILE} holds: training would "
                "aim at another head than the verifier's"
            )
        if loaded.requires_grad:
            raise BadStart(f"{name} of the draft would be trained; it is the verifier's")
    return digests


def freeze_as(model: Any, dtype: Any) -> None:
    """Keep the frozen matrices in the type of the products, in which the verifier stores them:
    half the memory, and nothing to turn each batch. The norm stays in fp32."""
    for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        part.weight.data = part.weight.data.to(dtype)


def trained(model: Any) -> dict[str, Any]:
    """The parameters that training changes, by name, in the model's order."""
    return {name: item for name, item in model.named_parameters() if item.requires_grad}


def init_vocab(checkpoint: Path, given: VocabMap | None) -> VocabMap:
    """The vocabulary of the checkpoint that training starts from, which it keeps.

    Raises:
        BadStart: a vocabulary is given besides, and is another.
        BadCheckpoint: see `check_checkpoint`.
    """
    config = check_checkpoint(checkpoint)
    weights = load_file(checkpoint / WEIGHTS)
    size = int(config["transformer_layer_config"]["vocab_size"])
    draft = int(config["draft_vocab_size"])
    if "t2d" in weights:
        found = check_map(weights["t2d"], weights["d2t"], size, draft)
    else:
        found = VocabMap(None, None, size, draft)
    if given is not None and not _same(found, given):
        raise BadStart(
            f"the vocab stage gives a map of {given.draft_size} tokens which is not that of the "
            f"checkpoint in init_from ({found.draft_size} tokens): the head's rows would stand "
            "for other tokens; leave `vocab` out to keep the checkpoint's"
        )
    return found


def _same(one: VocabMap, other: VocabMap) -> bool:
    if one.t2d is None or other.t2d is None:
        return one.t2d is other.t2d and one.verifier_size == other.verifier_size
    return bool(torch.equal(one.t2d, other.t2d))


def start_from(model: Any, checkpoint: Path) -> None:
    """Give a model the weights of a checkpoint.

    Raises:
        BadStart: the checkpoint is of another architecture, or was trained on other layers.
    """
    import json

    config = json.loads((checkpoint / CONFIG).read_text("utf-8"))
    layers = config["eagle_aux_hidden_state_layer_ids"]
    if list(layers) != list(model.config.eagle_aux_hidden_state_layer_ids):
        raise BadStart(
            f"the checkpoint in init_from was trained on aux layers {layers}, the states are of "
            f"layers {list(model.config.eagle_aux_hidden_state_layer_ids)}"
        )
    copy_into(trained(model), load_file(checkpoint / WEIGHTS), "the checkpoint in init_from")


def copy_into(parameters: Mapping[str, Any], weights: Mapping[str, Any], origin: str) -> None:
    """Raises: BadStart: a weight is missing or has another shape."""
    for name, parameter in parameters.items():
        if name not in weights or weights[name].shape != parameter.shape:
            found = list(weights[name].shape) if name in weights else "nothing"
            raise BadStart(
                f"{origin} has {found} for {name}; the draft of this stage needs "
                f"{list(parameter.shape)}: give `draft` the checkpoint's architecture"
            )
        with torch.no_grad():
            parameter.copy_(weights[name])


def as_served(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of trained parameters as a checkpoint holds them: in bf16, on the CPU."""
    return {
        name: item.detach().to(torch.bfloat16, copy=True).cpu() for name, item in parameters.items()
    }


def checkpoint_weights(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of the model holds: floating tensors in bf16, on the CPU.

    Args: `values`: the trained parameters, by name, see `as_served`.
    """
    state = {**model.state_dict(), **values}
    return {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in state.items()
        if tensor is not None
    }
