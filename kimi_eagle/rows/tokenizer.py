"""Load a verifier's tokenizer from its folder, as serving does. Imports transformers.

Three forms: `tokenizer.json`, which is read as it is; `tiktoken.model` alone, Kimi's as published
(see `tiktoken_form`); and what else transformers reads, such as sentencepiece's `tokenizer.model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.rows.tiktoken_form import RANKS, fast_form, pieces, rank_count, read_config
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import ADDITIONAL_TEMPLATES

TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a verifier or a `head` artifact, with its chat template.

    Raises:
        VerifierError: there is none that is read exactly, or it has no chat template.
    """
    if not (folder / TOKENIZER).exists() and (folder / RANKS).exists():
        tokenizer = _of_ranks(folder)
    else:
        tokenizer = _read(folder)
    if not tokenizer.chat_template:
        raise VerifierError(f"{folder} has no chat template (chat_template.jinja)")
    return tokenizer


def _read(folder: Path) -> Any:
    # Not AutoTokenizer where there is a tokenizer.json: it would go by model_type, and convert
    # what needs no conversion; and it loads torch.
    if (folder / TOKENIZER).exists():
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    try:
        return Loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - readers of damaged files raise anything
        raise VerifierError(f"the tokenizer in {folder} cannot be read: {error}") from None


def _of_ranks(folder: Path) -> Any:
    """Kimi's as published."""
    from transformers import PreTrainedTokenizerFast

    form = fast_form(folder)
    config = read_config(folder)
    named = {name: config[name] for name in _NAMED if isinstance(config.get(name), str)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=form,
        chat_template=_templates(folder, config.get("chat_template")),
        clean_up_tokenization_spaces=False,
        extra_special_tokens=config.get("additional_special_tokens") or [],
        **named,
    )
    tokenizer.name_or_path = str(folder)
    tokenizer.pieces = pieces
    return tokenizer


_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def _templates(folder: Path, configured: Any) -> Any:
    """The chat template, or the templates by name, from where transformers looks for them: files
    come before what the config says."""
    found = {
        item.stem: item.read_text("utf-8")
        for item in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    }
    single = folder / "chat_template.jinja"
    if single.exists():
        found["default"] = single.read_text("utf-8")
    if not found:
        if isinstance(configured, list):
            return {item["name"]: item["template"] for item in configured}
        return configured
    return found["default"] if list(found) == ["default"] else found


def token_count(folder: Path) -> int:
    """One more than the highest id of a verifier's tokenizer, added tokens included.

    Raises:
        VerifierError: see `load_tokenizer`.
    """
    from tokenizers import Tokenizer

    if not (folder / TOKENIZER).exists():
        if (folder / RANKS).exists():
            return rank_count(folder)
        return int(max(load_tokenizer(folder).get_vocab().values())) + 1
    try:
        vocabulary = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        raise VerifierError(f"{folder / TOKENIZER} cannot be read: {error}") from None
    return int(max(vocabulary.values())) + 1
