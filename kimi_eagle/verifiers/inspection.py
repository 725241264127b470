"""What a folder holds of a verifier, whether whole or not: for `init`, which writes from it.

Reads names, JSON and the headers of safetensors; no tokenizer is built and no tensor loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.verifiers.facts import FAMILIES, VerifierError, VerifierFacts
from kimi_eagle.verifiers.folder import (
    ADDITIONAL_TEMPLATES,
    INDEX,
    SINGLE,
    VerifierFolder,
    open_folder,
    tensor_files,
)

_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Inspection:
    """What was found in a verifier's folder, and what is wrong with it or missing."""

    folder: VerifierFolder
    weight_bytes: int | None
    """Of all safetensors together; None where there are none."""
    tokenizer: str | None
    """The file that text is encoded by; None where there is none that can be read exactly."""
    template: str | None
    """Where the chat template is; None where there is none."""
    thinks: bool
    """Whether the chat template writes `<think>`."""
    troubles: tuple[str, ...]
    """What has to be put right before the verifier can run, in words."""

    @property
    def facts(self) -> VerifierFacts:
        return self.folder.facts

    def found(self) -> list[tuple[str, str]]:
        """(what, what of it was found), in the order that people read it."""
        facts = self.facts
        nested = FAMILIES[facts.model_type].nested
        where = f"config in `{nested}`" if nested else "flat config"
        tied = ", tied to the embedding" if facts.tied_embeddings else ""
        rope = f"{facts.rope['rope_type']}, theta {facts.rope['rope_theta']:g}"
        names = [facts.embed_tokens, facts.norm] + [facts.lm_head] * (not facts.tied_embeddings)
        weights = "none here" if self.weight_bytes is None else f"{self.weight_bytes:,} bytes"
        template = self.template or "none"
        return [
            ("model_type", f"{facts.model_type}, {where}"),
            ("layers", f"{facts.num_layers}, hidden size {facts.hidden_size}"),
            ("vocabulary", f"{facts.vocab_size} tokens{tied}"),
            ("tensors", ", ".join(names)),
            ("positions", f"{facts.max_positions}, rotary {rope}"),
            ("weights", weights),
            ("tokenizer", self.tokenizer or "none"),
            ("chat template", template + (", writes <think>" if self.thinks else "")),
        ]


def inspect(path: Path) -> Inspection:
    """Look at a verifier's folder, which may lack weights, tokenizer and template.

    Raises:
        VerifierError: there is no such folder, or its config.json is not one of a known family.
    """
    folder = open_folder(path)
    troubles = []
    weight_bytes, trouble = _weights(folder)
    troubles += [trouble] if trouble else []
    tokenizer, trouble = _tokenizer(path, folder.facts.vocab_size)
    troubles += [trouble] if trouble else []
    template, text = _template(path)
    if template is None:
        troubles.append(
            "there is no chat template: put chat_template.jinja into the folder; the prompts of "
            "rows are rendered with it"
        )
    return Inspection(folder, weight_bytes, tokenizer, template, "<think>" in text, tuple(troubles))


def _weights(folder: VerifierFolder) -> tuple[int | None, str | None]:
    """Bytes of the weights, and what is wrong with them."""
    path = folder.path
    present = list(path.glob("*.safetensors"))
    if not present and not (path / INDEX).exists():
        return None, (
            f"there are no weights ({SINGLE}, or {INDEX} and its files): the manifest can be "
            "validated and planned, but not submitted"
        )
    size = sum(item.stat().st_size for item in present)
    try:
        folder.head_tensors()
        size = sum((path / name).stat().st_size for name in set(tensor_files(path).values()))
    except VerifierError as error:
        return size, f"the weights are not whole: {error}"
    return size, None


def _tokenizer(path: Path, vocab_size: int) -> tuple[str | None, str | None]:
    """The file that text is encoded by, and what is wrong with it."""
    if (path / "tokenizer.json").exists():
        document = _json(path / "tokenizer.json")
        ids = _ids(document)
        if not ids:
            return None, "tokenizer.json cannot be read: it holds no token ids"
        if max(ids) >= vocab_size:
            return "tokenizer.json", (
                f"tokenizer.json has the id {max(ids)}, config.json a vocabulary of {vocab_size}: "
                "one of the two is of another model"
            )
        return "tokenizer.json", None
    if (path / "tiktoken.model").exists():
        if _json(path / _CONFIG).get("tokenizer_class") == "TikTokenTokenizer":
            return "tiktoken.model", None
        return None, (
            f"there is tiktoken.model, but no {_CONFIG} that names TikTokenTokenizer: how text is "
            "split is not known; put the tokenizer.json made from it beside it"
        )
    if (path / "tokenizer.model").exists():
        return "tokenizer.model", None
    return None, (
        "there is no tokenizer: put tokenizer.json (or Kimi's tiktoken.model and "
        f"{_CONFIG}) into the folder"
    )


def _ids(tokenizer: Mapping[str, Any]) -> list[int]:
    """Ids that a tokenizer.json gives; those of a list are its places."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        found = [value for value in vocab.values() if type(value) is int]
    else:
        found = list(range(len(vocab))) if isinstance(vocab, list) else []
    items = added if isinstance(added, list) else []
    found += [
        item["id"] for item in items if isinstance(item, Mapping) and type(item.get("id")) is int
    ]
    return found


def _template(path: Path) -> tuple[str | None, str]:
    """Where the chat template is, and its text."""
    for name in _TEMPLATES:
        if (path / name).exists():
            return name, (path / name).read_text("utf-8", errors="replace")
    several = sorted((path / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    if several:
        text = "".join(item.read_text("utf-8", errors="replace") for item in several)
        return f"{ADDITIONAL_TEMPLATES}/", text
    configured = _json(path / _CONFIG).get("chat_template")
    return (_CONFIG, json.dumps(configured)) if configured else (None, "")


def _json(path: Path) -> Mapping[str, Any]:
    """A JSON object; empty where there is none to be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
