"""The model card of a release. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml


def model_card(
    name: str,
    license_id: str,
    base_model: str | None,
    evaluation: Mapping[str, Any],
    checkpoint: str,
    config: Mapping[str, Any],
) -> str:
    """README.md with the front matter that model hubs read."""
    length = evaluation["acceptance_length"]
    front: dict[str, Any] = {
        "license": license_id,
        "language": ["en"],
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "draft-model"],
    }
    if base_model is not None:
        front["base_model"] = base_model
    front["model-index"] = [
        {
            "name": name,
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"type": "prompts", "name": f"{evaluation['prompts']} prompts"},
                    "metrics": [
                        {
                            "type": "acceptance_length",
                            "value": round(length, 4),
                            "args": {
                                "engine": evaluation["engine"],
                                "k": evaluation["draft_tokens"],
                                "temperature": evaluation["temperature"],
                                "includes_bonus": evaluation["includes_bonus"],
                            },
                        }
                    ],
                }
            ],
        }
    ]
    positions = ", ".join(f"{share:.3f}" for share in evaluation["per_position"])
    same = "identical to" if evaluation["outputs_identical"] else "not all equal to"
    verifier = base_model or "its verifier"
    serve = json.dumps(
        {
            "method": "eagle3",
            "model": "THIS_FOLDER",
            "num_speculative_tokens": evaluation["draft_tokens"],
        }
    )
    front_matter = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"""---
{front_matter.rstrip()}
---

# {name}

An EAGLE-3 draft model for {verifier}.

```
vllm serve VERIFIER --speculative-config '{serve}'
```

- Acceptance length {length:.3f}: tokens committed per draft step, pooled over
  {evaluation["prompts"]} prompts, the bonus token included, measured in {evaluation["engine"]} with
  {evaluation["draft_tokens"]} draft tokens, greedy, one request at a time.
- Acceptance by position: {positions}.
- Outputs {same} decoding without the draft.
- Aux layers {config["eagle_aux_hidden_state_layer_ids"]} (input embeddings are 0), draft
  vocabulary {config["draft_vocab_size"]}.
- Checkpoint {checkpoint}.
"""
