"""A first manifest for a verifier: commented, complete but for what only its user knows. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimi_eagle.verifiers.facts import VerifierError, VerifierFacts
from kimi_eagle.verifiers.inspection import Inspection

SOURCES, PROMPTS = "chats/*.jsonl", "prompts.jsonl"
"""What stands in a manifest for what was not given, relative to it."""

# From this hidden size on, a verifier is taken for one that GPUs serve.
_LARGE = 2048
# Of one GPU's memory, what its share of the weights may take, in bytes: 80 GB, and room to work.
_SHARE = 50e9
_MOST_GPUS = 8


@dataclass(frozen=True)
class Starter:
    """A manifest's text, what it takes for granted, and what is left to its user."""

    text: str
    assumed: tuple[str, ...]
    to_do: tuple[str, ...]


def starter(
    found: Inspection,
    verifier: str,
    name: str,
    sources: Sequence[str] = (),
    prompts: str | None = None,
) -> Starter:
    """Write a manifest.

    Args:
        verifier, sources, prompts: paths as the manifest is to hold them.
        name: of the manifest; what no name can have in it is left out.
    """
    facts = found.facts
    layers, layers_why = _layers(facts)
    large = facts.hidden_size >= _LARGE
    size, size_why = _vocabulary(facts.vocab_size)
    length = min(8192 if large else 1024, facts.max_positions)
    rate, epochs = ("3e-5", "3") if large else ("1e-3", "8")
    gpus, gpus_why = _gpus(found)
    assumed = [
        layers_why,
        size_why,
        f"max_length {length}: longer ones are cut; there is room for {facts.max_positions}",
        f"lr {rate}, {epochs} epochs, 3 TTT steps: usual for a verifier of this size",
        f"tensor_parallel {gpus}: {gpus_why}",
    ]
    to_do = list(found.troubles)
    if not sources:
        to_do.append(
            f"stages.rows.sources: put your conversations at {SOURCES} (beside the manifest), or "
            "write where they are"
        )
    if prompts is None:
        to_do.append(
            f"stages.score.prompts: put questions that were not trained on at {PROMPTS}, or write "
            "where they are"
        )
    to_do.append("stages.release: say the verifier's licence, and its public name in base_model")
    values = {
        "facts": f"{facts.model_type}, {facts.num_layers} layers, hidden size {facts.hidden_size}, "
        f"vocabulary {facts.vocab_size}",
        "name": manifest_name(name),
        "verifier": _quoted(verifier),
        "sources": "\n".join(
            f"      - {{path: {_quoted(path)}}}" for path in (sources or (SOURCES,))
        ),
        "prompts": _quoted(PROMPTS if prompts is None else prompts),
        "length": str(length),
        "thinking": "\n" + _THINKING.strip("\n") if found.thinks else "",
        "bytes": f"{(len(layers) + 1) * facts.hidden_size * 2:,}",
        "states": f"{len(layers)} aux + 1 last, × {facts.hidden_size} × 2",
        "layers": str(list(layers)),
        "engine": f"{{kind: vllm, tensor_parallel: {gpus}}}" if gpus > 1 else "{kind: vllm}",
        "size": str(size),
        "vocab_size": str(facts.vocab_size),
        "rate": rate,
        "epochs": epochs,
        "draft": f"{facts.num_heads} heads of {facts.head_dim}, "
        f"intermediate {facts.intermediate_size}, rope {facts.rope['rope_type']}",
        "fill_sources": "" if sources else "FILL IN: ",
        "fill_prompts": "" if prompts is not None else "FILL IN: ",
    }
    return Starter(_filled(values), tuple(assumed), tuple(to_do))


def manifest_name(text: str) -> str:
    """A text as a manifest's name: letters, digits, `.`, `_` and `-`, beginning with one of the
    first two."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:100].rstrip("-")
    return name or "draft"


def _layers(facts: VerifierFacts) -> tuple[tuple[int, ...], str]:
    try:
        layers = facts.aux_layers("default")
    except VerifierError:
        n = facts.num_layers
        layers = tuple(sorted({min(2, n - 1), n // 2, max(n - 3, 0)}))
        return layers, (
            f"layers {list(layers)}: the usual three (2, the middle, the third from the end) "
            f"coincide in a verifier of {n} layers"
        )
    return layers, (
        f"layers {list(layers)}: 2, the middle, and the third from the end, counting the input "
        "embeddings as 0"
    )


def _vocabulary(of: int) -> tuple[int, str]:
    if of > 64_000:
        return 32_000, f"a draft vocabulary of 32000 of {of}: what is usual for large vocabularies"
    half = 1 << max((of // 2).bit_length() - 1, 0)
    return half, f"a draft vocabulary of {half} of {of}: about half"


def _gpus(found: Inspection) -> tuple[int, str]:
    """GPUs to a copy of the verifier, and why so many."""
    heads = found.facts.num_heads
    fitting = [n for n in (1, 2, 4, _MOST_GPUS) if heads % n == 0]
    if found.weight_bytes is None:
        experts = any(
            isinstance(found.facts.text_config.get(name), int)
            and found.facts.text_config[name] > _MOST_GPUS
            for name in ("n_routed_experts", "num_experts")
        )
        if experts and found.facts.hidden_size >= _LARGE:
            return fitting[-1], "weights are not here, and mixtures of experts are large"
        return 1, "weights are not here to tell their size"
    for count in fitting:
        if found.weight_bytes / count <= _SHARE:
            return count, (
                f"{found.weight_bytes / 1e9:.2g} GB of weights, at most {_SHARE / 1e9:.0f} GB "
                "of them to a GPU of 80"
            )
    return fitting[-1], f"{found.weight_bytes / 1e9:.0f} GB of weights, one node of GPUs"


def _quoted(text: str) -> str:
    """Text as a YAML scalar that is that text whatever is in it."""
    return json.dumps(text, ensure_ascii=False)


def _filled(values: Mapping[str, str]) -> str:
    return re.sub(r"<<(\w+)>>", lambda found: values[found[1]], _TEXT)


_THINKING = """
    # Where an answer carries reasoning it is trained on, as serving with thinking opens it.
    thinking: auto
"""

_TEXT = """\
# Written by `kimi-eagle init` for a verifier of <<facts>>.
# `kimi-eagle validate` checks it, `plan` says what would run, `submit` runs it.
# Every key and its default: docs/reference/manifest.md; for editors: `kimi-eagle schema`.
version: 1
name: <<name>>

verifier:
  path: <<verifier>>

stages:
  # embed_tokens, norm and lm_head, the text config and the tokenizer: all that training needs.
  head:
    kind: head

  # Conversations → rows: the prompt as serving sends it, the answer as the verifier emits it.
  rows:
    kind: prepare
    # <<fill_sources>>your conversations: .json, .jsonl (also compressed), .parquet, saved datasets.
    sources:
<<sources>>
    max_length: <<length>>
    val_ratio: 0.05
    seed: 0<<thinking>>

  # The verifier once over every row. Hidden states take <<bytes>> bytes a token
  # (<<states>>); `kimi-eagle plan` says how much that is in all.
  states:
    kind: extract
    rows: rows
    # Counting the input embeddings as 0.
    layers: <<layers>>
    engine: <<engine>>

  # Which of the verifier's <<vocab_size>> tokens the draft can propose, by frequency.
  vocab:
    kind: vocab
    rows: rows
    size: <<size>>

  draft:
    kind: train
    head: head
    states: states
    vocab: vocab
    epochs: <<epochs>>
    lr: <<rate>>
    ttt_steps: 3
    batch_tokens: <<length>>
    # As the verifier has it: <<draft>>.
    draft: {layers: 1}
    seed: 0

  # Acceptance length in vLLM, with and without the draft; simulated from stored states too.
  score:
    kind: evaluate
    checkpoint: draft
    states: states
    # <<fill_prompts>>questions that were not trained on, one JSON object a line
    # (`messages`, `turns`, `prompt` or `question`).
    prompts: {path: <<prompts>>}
    draft_tokens: 3
    max_tokens: 256
    engine: <<engine>>

  # The folder that serving loads; refused when the evaluation falls short of the gate.
  release:
    kind: export
    checkpoint: draft
    evaluation: score
    # FILL IN: the verifier's licence, and its public name for the model card.
    license: other
    # base_model: owner/name
    # gate: {min_acceptance_length: 2.0}
"""
