"""Copy three tensors and the text parts out of the verifier."""

from __future__ import annotations

import json
import shutil
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.job import StageFailed
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.head.copy import copy, find


def run(context: Context) -> dict[str, Any]:
    verifier = context.verifier
    facts = verifier.facts
    out = context.out("head")
    located = verifier.head_tensors()
    tensors = {plain: find(path, name) for plain, (path, name) in located.items()}
    expected = {
        "model.embed_tokens.weight": (facts.vocab_size, facts.hidden_size),
        "model.norm.weight": (facts.hidden_size,),
        "lm_head.weight": (facts.vocab_size, facts.hidden_size),
    }
    for plain, shape in expected.items():
        found = tensors[plain].shape
        if found != shape:
            raise StageFailed(
                f"{located[plain][1]} has shape {list(found)}; "
                f"by config.json it must be {list(shape)}"
            )
    tied = located["lm_head.weight"][1] == facts.embed_tokens
    total = copy(tensors, out / "model.safetensors")
    write_json(
        out / "model.safetensors.index.json",
        {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys(tensors, "model.safetensors"),
        },
    )
    # The flat text config: what reads it needs no knowledge of nesting and prefixes. Head and
    # embedding are two tensors here even where the verifier ties them.
    config = {**facts.text_config, "tie_word_embeddings": False}
    if config.get("model_type") == "kimi_k2":
        config["model_type"] = (
            "deepseek_v3"  # the same architecture, by the name transformers knows
        )
    config.pop("auto_map", None)
    config.pop("quantization_config", None)
    write_json(out / "config.json", config)
    for name in verifier.part("tokenizer"):
        if name != "config.json":
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(verifier.path / name, out / name)
    write_json(
        out / "head.json",
        {
            "architectures": json.loads((verifier.path / "config.json").read_text("utf-8")).get(
                "architectures", []
            ),
            "tied": tied,
            "tensors": {plain: name for plain, (_, name) in located.items()},
        },
    )
    size = sum(item.stat().st_size for item in out.iterdir())
    return {
        "bytes": size,
        "tied": tied,
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
    }
