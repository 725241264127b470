"""A verifier's folder: its files, their parts, and the tensors of its safetensors. Pure reading.

Headers are read with the standard library alone, so that a login node without torch can tell a
stale index from a whole one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kimi_eagle.verifiers.facts import (
    UnknownArchitecture,
    VerifierError,
    VerifierFacts,
    read_facts,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# What makes token ids of text: any change here changes rows.
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
# Of these, what holds a vocabulary.
_VOCABULARIES = ("merges.txt", "tiktoken.model", "tokenizer.json", "tokenizer.model", "vocab.json")
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""A folder of templates by name; `tool_use.jinja` renders conversations with tools."""
_WEIGHTS = ".safetensors"
_IGNORED_SUFFIXES = (
    ".md",
    ".png",
    ".jpg",
    ".gif",
    ".pdf",
    ".txt",
    ".lock",
    ".bin",
    ".pth",
    ".gguf",
)


@dataclass(frozen=True)
class VerifierFolder:
    """A verifier on this machine."""

    path: Path
    facts: VerifierFacts
    files: tuple[str, ...]
    """Every file that decides what the verifier computes, relative, sorted."""

    @property
    def has_weights(self) -> bool:
        """Whether there is any file of tensors; whether they are whole, who reads them says."""
        return any(name.endswith(_WEIGHTS) for name in self.files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a file that a tokenizer is made of."""
        return any(name in self.files for name in _VOCABULARIES)

    def part(self, name: str) -> tuple[str, ...]:
        """The files of `whole` or `tokenizer`."""
        if name == "whole":
            return self.files
        templates = f"{ADDITIONAL_TEMPLATES}/"
        return tuple(
            file for file in self.files if file in TOKENIZER_FILES or file.startswith(templates)
        )

    def locate(self, *names: str) -> dict[str, Path]:
        """The file that holds each named tensor.

        Raises:
            VerifierError: an index that disagrees with its shards, or a tensor that is nowhere,
                with the nearest names there are.
        """
        where = tensor_files(self.path)
        found = {}
        for name in names:
            if name not in where:
                near = get_close_matches(name, where, n=3, cutoff=0.5)
                tail = [
                    key for key in where if key.endswith("." + name.rsplit(".", 2)[-2] + ".weight")
                ]
                hint = ", ".join(dict.fromkeys([*near, *tail][:5])) or ", ".join(sorted(where)[:5])
                raise VerifierError(f"{self.path}: no tensor {name}; the nearest are {hint}")
            found[name] = self.path / where[name]
        return found

    def head_tensors(self) -> dict[str, tuple[Path, str]]:
        """The three tensors of training by their plain names: (file, name in the file).

        With tied embeddings the embedding is the head, as serving has it: an lm_head that is
        stored all the same is not read there either.

        Raises:
            VerifierError: a tensor is missing; lm_head is missing although nothing is tied.
        """
        facts = self.facts
        where = tensor_files(self.path)
        if facts.lm_head not in where and not facts.tied_embeddings:
            raise VerifierError(
                f"{self.path}: no tensor {facts.lm_head}, and config.json says "
                "tie_word_embeddings: false, so the embedding must not stand in for it"
            )
        head = facts.embed_tokens if facts.tied_embeddings else facts.lm_head
        names = {
            "model.embed_tokens.weight": facts.embed_tokens,
            "model.norm.weight": facts.norm,
            "lm_head.weight": head,
        }
        located = self.locate(*names.values())
        return {plain: (located[name], name) for plain, name in names.items()}


def open_folder(path: Path) -> VerifierFolder:
    """Look at a verifier's folder.

    Raises:
        VerifierError: there is none, or it has no readable config.json.
    """
    if not path.is_dir():
        raise VerifierError(
            f"verifier folder {path} does not exist; give the path of a downloaded checkpoint "
            "(nothing is fetched from a hub)"
        )
    config = _read_json(path / "config.json")
    try:
        facts = read_facts(config)
    except UnknownArchitecture as error:
        near = _head_like(path)
        raise VerifierError(
            f"{error}; its tensors that look like the embedding, the last norm and the head are: "
            f"{', '.join(near) or 'none'}"
        ) from None
    return VerifierFolder(path, facts, tuple(_relevant(path)))


def _head_like(path: Path) -> list[str]:
    """Tensors outside the layers that could be what training needs, for a message."""
    try:
        names = tensor_files(path)
    except VerifierError:
        return []
    wanted = ("embed", "norm", "head", "wte", "output")
    outside = (name for name in names if not any(part.isdigit() for part in name.split(".")))
    return [name for name in outside if any(word in name for word in wanted)][:8]


def _additional_templates(path: Path) -> list[str]:
    folder = path / ADDITIONAL_TEMPLATES
    return [f"{folder.name}/{item.name}" for item in folder.glob("*.jinja") if item.is_file()]


def _relevant(path: Path) -> list[str]:
    names = _additional_templates(path)
    for item in sorted(path.iterdir()):
        if not item.is_file() or item.name.startswith("."):
            continue
        known = item.name in TOKENIZER_FILES
        if known or not item.name.lower().endswith(_IGNORED_SUFFIXES):
            names.append(item.name)
    return sorted(names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise VerifierError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise VerifierError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise VerifierError(f"{path} must hold a JSON object")
    return value


def safetensors_header(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Name → {dtype, shape, data_offsets} of a safetensors file, read with nothing but its header.

    Raises:
        VerifierError: the file is no safetensors file, or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 100_000_000:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        size = path.stat().st_size
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        header.pop("__metadata__", None)
        ends = [_end(name, entry) for name, entry in header.items()]
    except (OSError, ValueError, struct.error) as error:
        raise VerifierError(f"{path} is not a readable safetensors file: {error}") from None
    end = 8 + length + max(ends, default=0)
    if size != end:
        raise VerifierError(
            f"{path} holds {size} bytes, its header says {end}: truncated or altered"
        )
    return header


def _end(name: str, entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or [type(item) for item in offsets] != [int, int]:
        raise ValueError(f"its header does not place {name}")
    return int(offsets[1])


def tensor_files(path: Path) -> dict[str, str]:
    """Which file of the folder holds which tensor.

    Raises:
        VerifierError: no weights, or an index that names more or less than its shards hold.
    """
    index = path / INDEX
    if not index.exists():
        single = path / SINGLE
        if not single.exists():
            raise VerifierError(f"{path} has neither {INDEX} nor {SINGLE}")
        return dict.fromkeys(safetensors_header(single), SINGLE)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise VerifierError(f"{index}: no weight_map")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise VerifierError(f"{index}: weight_map must give a file name for every tensor")
    held: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        if "/" in shard or not (path / shard).is_file():
            raise VerifierError(f"{index} is stale: it names {shard}, which is not in the folder")
        for name in safetensors_header(path / shard):
            if name in held:
                raise VerifierError(f"{path}: {held[name]} and {shard} both hold {name}")
            held[name] = shard
    for extra in sorted(path.glob("*" + _WEIGHTS)):
        # Mistral's folders carry the whole model a second time, under other names.
        if extra.name in weight_map.values() or extra.name.startswith("consolidated"):
            continue
        for name in safetensors_header(extra):
            if name not in weight_map:
                raise VerifierError(f"{index} is stale: {extra.name} holds {name}, which it omits")
    for name, shard in weight_map.items():
        if held.get(name) != shard:
            raise VerifierError(f"{index} is stale: it says {name} is in {shard}, which lacks it")
    for name, shard in held.items():
        if name not in weight_map:
            raise VerifierError(f"{index} is stale: {shard} holds {name}, which it omits")
    return held
