"""The model card of a release. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

# What a command of the card holds in place of a folder.
VERIFIER, FOLDER = "VERIFIER", "THIS_FOLDER"


@dataclass(frozen=True)
class Origin:
    """What a release was made from: digests, and the reports of rows and vocabulary."""

    checkpoint: str
    evaluation: str
    verifier: str
    rows: Mapping[str, Any] | None
    vocab: Mapping[str, Any] | None


def model_card(
    target: str,
    license_id: str,
    base_model: str | None,
    evaluation: Mapping[str, Any],
    origin: Origin,
    config: Mapping[str, Any],
) -> str:
    """README.md with the front matter that model hubs read.

    Args:
        target: `vllm` or `sglang`.
        evaluation: evaluation.json.
        config: speculators' config.json of the checkpoint.
    """
    name = f"{(base_model or 'draft').rsplit('/', 1)[-1]}-eagle3"
    measurements = evaluation["measurements"]
    front: dict[str, Any] = {
        "license": license_id,
        "language": ["en"],
        "library_name": target,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "draft-model"],
    }
    if base_model is not None:
        front["base_model"] = base_model
    front["model-index"] = [{"name": name, "results": [_result(one) for one in measurements]}]
    front_matter = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    layers = config["eagle_aux_hidden_state_layer_ids"]
    return f"""---
{front_matter.rstrip()}
---

# {name}

An EAGLE-3 draft model for {base_model or "its verifier"}.

## Serve it

```
{serve_command(target, evaluation["draft_tokens"])}
```

{_reading(target, layers, config["draft_vocab_size"])}

## Acceptance

Acceptance length is tokens committed per draft step, pooled over all requests, the bonus token
included: 1 is a draft that never helps, k + 1 the most that k draft tokens can give. Measured in
vLLM. ± is the standard error over requests.

{_table(measurements)}

{_notes(evaluation)}

## Made from

{_made_from(origin)}

With the registry that made it, or a record of it (`kimi-eagle record`), the same bytes come again:

```
kimi-eagle reproduce {origin.checkpoint}
kimi-eagle reproduce {origin.evaluation}
```
"""


def serve_command(target: str, draft_tokens: int) -> str:
    """The command that serves the release, with `VERIFIER` and `THIS_FOLDER` for the folders."""
    if target == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {VERIFIER} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {FOLDER} "
            f"--speculative-num-steps {draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {draft_tokens + 1}"
        )
    settings = {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": draft_tokens}
    return f"vllm serve {VERIFIER} --speculative-config '{json.dumps(settings)}'"


def _reading(target: str, layers: Sequence[int], draft_vocab: int) -> str:
    vocab = f"Draft vocabulary {draft_vocab}, `d2t` holds offsets."
    if target == "vllm":
        return f"Aux layers {list(layers)} (the input embeddings are 0). {vocab}"
    return (
        f"Aux layers {[layer - 1 for layer in layers]} as SGLang counts them (the output of "
        f"layer i, from 0). vLLM counts the input embeddings as 0, calls the same layers "
        f"{list(layers)}, and needs the release that is made for it. {vocab}"
    )


def _result(measured: Mapping[str, Any]) -> dict[str, Any]:
    length = measured["acceptance_length"]
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": "prompts", "name": measured["set"]},
        "metrics": [
            {
                "type": "acceptance_length",
                "value": None if length is None else round(length, 4),
                "args": {
                    "engine": "vllm",
                    "k": measured["draft_tokens"],
                    "temperature": measured["temperature"],
                    "includes_bonus": measured["includes_bonus"],
                    "prompts": measured["prompts"],
                },
            }
        ],
    }


def _table(measurements: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| set | prompts | k | temperature | acceptance length | per request | by position |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in measurements:
        error = one["standard_error"]
        pooled = _figure(one["acceptance_length"]) + (
            f" ± {error:.3f}" if error is not None else ""
        )
        positions = ", ".join(f"{share:.3f}" for share in one["per_position"])
        lines.append(
            f"| {one['set']} | {one['prompts']} | {one['draft_tokens']} | {one['temperature']:g} "
            f"| {pooled} | {_figure(one['acceptance_length_per_request'])} | {positions} |"
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _notes(evaluation: Mapping[str, Any]) -> str:
    notes = []
    if evaluation["outputs_identical"]:
        notes.append("Outputs are identical to decoding without the draft, token for token.")
    elif evaluation["outputs_equal"] is not None:
        notes.append(
            f"{evaluation['outputs_equal']} of {evaluation['prompts']} outputs are those of "
            "decoding without the draft."
        )
        if "outputs_equal_without_draft" in evaluation:
            notes.append(
                f"Decoded {evaluation['batch']} at once; between two runs without the draft "
                f"{evaluation['outputs_equal_without_draft']} are."
            )
    if evaluation["simulated_acceptance_length"] is not None:
        notes.append(
            "Simulated from stored hidden states, without an engine, the acceptance length is "
            f"{evaluation['simulated_acceptance_length']:.3f}"
            + _gap(evaluation["simulated_gap"])
            + "."
        )
    return " ".join(notes)


def _gap(gap: float | None) -> str:
    return "" if gap is None else f" ({gap:+.1%} of what was served)"


def _made_from(origin: Origin) -> str:
    lines = [f"- checkpoint {origin.checkpoint}"]
    lines += [f"- evaluation {origin.evaluation}", f"- verifier {origin.verifier}"]
    rows, vocab = origin.rows, origin.vocab
    if rows is not None:
        told = [
            f"{rows[key]:,} {words}"
            for key, words in (
                ("conversations", "conversations"),
                ("rows_train", "rows to train on"),
                ("rows_val", "to validate"),
                ("tokens", "tokens"),
                ("supervised_tokens", "of them learnt"),
                ("rejected", "records left out"),
            )
            if isinstance(rows.get(key), int)
        ]
        lines.append(f"- rows {rows['digest']}" + (f": {', '.join(told)}" if told else ""))
    if vocab is not None:
        coverage = vocab.get("coverage")
        covers = f": covers {coverage:.2%}" if isinstance(coverage, float) else ""
        lines.append(f"- vocabulary {vocab['digest']}{covers}")
    return "\n".join(lines)
