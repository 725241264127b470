"""What a folder must be to be served as the checkpoint was trained. Imports torch.

Two proofs: the checkpoint fits the verifier it is released for, and the folder that was written,
read again, computes what the checkpoint does, to the last bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kimi_eagle.draft.checkpoint import BadCheckpoint
from kimi_eagle.draft.eagle3 import Eagle3, rope_frequencies
from kimi_eagle.verifiers.folder import VerifierFolder

# Texts in a config.json that name a place: a path, a drive, a file URL.
_PLACE = re.compile(r"(?:^|[\s\"'=:])(?:/|~/|\.{1,2}/|[A-Za-z]:\\|file:)", re.ASCII)
_TOKENS = 24


def check_against(
    verifier: VerifierFolder, config: Mapping[str, Any], draft: Eagle3, weights: Mapping[str, Any]
) -> None:
    """Refuse a draft that is not one for this verifier, or was changed after its training.

    Raises:
        BadCheckpoint: another hidden size or vocabulary; rotary settings other than the
            verifier's (theta, or scaling that was dropped); aux layers that it does not have; an
            embedding that is not the verifier's although it was not trained.
    """
    facts, numbers = verifier.facts, draft.config
    for what, found, expected in (
        ("hidden_size", numbers.hidden_size, facts.hidden_size),
        ("vocab_size", numbers.vocab_size, facts.vocab_size),
    ):
        if found != expected:
            raise BadCheckpoint(f"the draft's {what} is {found}, the verifier's {expected}")
    if max(numbers.aux_layers) >= facts.num_layers:
        raise BadCheckpoint(
            f"aux layers {list(numbers.aux_layers)} for a verifier of {facts.num_layers} layers"
        )
    ours, scale = rope_frequencies(numbers.rope, numbers.head_dim)
    theirs, expected_scale = rope_frequencies(facts.rope, numbers.head_dim)
    if not torch.allclose(ours, theirs, rtol=1e-6, atol=0) or abs(scale - expected_scale) > 1e-6:
        raise BadCheckpoint(
            f"the draft's rotary settings {dict(numbers.rope)} are not the verifier's {facts.rope}"
        )
    if not config.get("embed_requires_grad", False):
        _same_embedding(verifier, weights["embed_tokens.weight"])


def _same_embedding(verifier: VerifierFolder, ours: Any) -> None:
    name = verifier.facts.embed_tokens
    with safe_open(verifier.locate(name)[name], framework="pt") as file:
        theirs = file.get_tensor(name)
    if theirs.shape != ours.shape or not torch.equal(theirs.to(ours.dtype), ours):
        shared = theirs.shape == ours.shape
        other = int((theirs.to(ours.dtype) != ours).any(-1).sum()) if shared else len(ours)
        raise BadCheckpoint(
            f"embed_tokens.weight differs from the verifier's in {other} of {len(ours)} tokens, "
            "although it was not trained: it was never filled, or replaced"
        )


def same_logits(checkpoint: Eagle3, written: Eagle3) -> None:
    """Refuse a folder that, read again, computes anything else than the checkpoint.

    Both run over the same drawn states and one step of a chain; every bit must agree.

    Raises:
        BadCheckpoint: with how far the logits lie apart.
    """
    if checkpoint.config.aux_layers != written.config.aux_layers:
        raise BadCheckpoint(
            f"the folder reads aux layers {list(written.config.aux_layers)}, the checkpoint "
            f"{list(checkpoint.config.aux_layers)}"
        )
    numbers = checkpoint.config
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(
        _TOKENS, len(numbers.aux_layers) * numbers.hidden_size, generator=generator
    ).to(torch.bfloat16)
    tokens = torch.randint(0, numbers.vocab_size, (_TOKENS,), generator=generator)
    with torch.inference_mode():
        ours, theirs = (_logits(draft, tokens, aux) for draft in (checkpoint, written))
        for one, other in zip(ours, theirs, strict=True):
            if one.shape != other.shape or not torch.equal(one, other):
                far = float((one.float() - other.float()).abs().max())
                raise BadCheckpoint(
                    f"read again, the folder's logits differ from the checkpoint's by up to {far}"
                )


def _logits(draft: Eagle3, tokens: Any, aux: Any) -> list[Any]:
    """Logits of a pass over states and of one step behind it, and the tokens they propose."""
    state, chain = draft.read(tokens, draft.combine(aux))
    starts = torch.arange(len(tokens))
    proposed = draft.proposed(state)
    further = draft.draft(chain, starts, 1, proposed, state)
    return [draft.logits(state), proposed, draft.logits(further), draft.proposed(further)]


def check_published(folder: Path) -> None:
    """Refuse a folder that names a place of this machine.

    Raises:
        BadCheckpoint: with the text.
    """
    for path in sorted(folder.glob("*.json")):
        for text in _texts(json.loads(path.read_text("utf-8"))):
            if _PLACE.search(text):
                raise BadCheckpoint(f"{path.name} names a place of this machine: {text!r}")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []
