"""Load a verifier's tokenizer from its folder, as serving does. Imports transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.verifiers.facts import VerifierError

TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a verifier or a `head` artifact, with its chat template.

    Raises:
        VerifierError: there is none that is read exactly, or it has no chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (folder / TOKENIZER).exists() and (folder / "tiktoken.model").exists():
        raise VerifierError(
            f"{folder} has only tiktoken.model: transformers converts it with a split that is not "
            "the model's own; put the tokenizer.json made from it beside it"
        )
    # Not AutoTokenizer where there is a tokenizer.json: it would go by model_type, and convert
    # what needs no conversion.
    loader = PreTrainedTokenizerFast if (folder / TOKENIZER).exists() else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - readers of damaged files raise anything
        raise VerifierError(f"the tokenizer in {folder} cannot be read: {error}") from None
    if not tokenizer.chat_template:
        raise VerifierError(f"{folder} has no chat template (chat_template.jinja)")
    return tokenizer


def token_count(folder: Path) -> int:
    """One more than the highest id of a verifier's tokenizer, added tokens included.

    Raises:
        VerifierError: see `load_tokenizer`.
    """
    from tokenizers import Tokenizer

    if not (folder / TOKENIZER).exists():
        return int(max(load_tokenizer(folder).get_vocab().values())) + 1
    try:
        vocabulary = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        raise VerifierError(f"{folder / TOKENIZER} cannot be read: {error}") from None
    return int(max(vocabulary.values())) + 1
