"""Load a verifier's tokenizer from its folder, as serving does. Imports transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.verifiers.facts import VerifierError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a verifier or a `head` artifact, with its chat template.

    Raises:
        VerifierError: there is none that is read exactly, or it has no chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        # Not AutoTokenizer: that would go by model_type, and convert where nothing is to convert.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    elif (folder / "tiktoken.model").exists():
        raise VerifierError(
            f"{folder} has only tiktoken.model: transformers converts it with a split that is not "
            "the model's own; put the tokenizer.json made from it beside it"
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise VerifierError(f"{folder} has no chat template (chat_template.jinja)")
    return tokenizer
