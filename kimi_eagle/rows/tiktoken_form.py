"""tiktoken.model → the form that the tokenizers library reads. Imports tokenizers.

A `tiktoken.model` holds tokens and their ranks; how text is split before they apply is code, which
lies beside it in Kimi's folder. It is Kimi's own split: with the one that is commonly assumed,
"I'm" comes out as other tokens. So what the file alone does not say is taken for Kimi's only where
the folder says that it is Kimi's tokenizer.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle.verifiers.facts import VerifierError

RANKS = "tiktoken.model"
CONFIG = "tokenizer_config.json"
_CLASS = "TikTokenTokenizer"
_ADDED = 256
"""Ids after the ranks, named or reserved."""

# Letters by case, without Chinese characters: these are split apart on their own.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def fast_form(folder: Path) -> Any:
    """The tokenizer of a folder that has only `tiktoken.model`, as a `tokenizers.Tokenizer`.

    Raises:
        VerifierError: it is not Kimi's, or one of its files cannot be read.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    config = read_config(folder)
    ranks = read_ranks(folder / RANKS)
    written = _alphabet()
    names = {token: "".join(map(written.__getitem__, token)) for token in ranks}
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    # tiktoken takes a piece that is a token whole, whatever merges would make of it.
    model = models.BPE(
        vocab={names[token]: rank for token, rank in ranks.items()},
        merges=merges,
        ignore_merges=True,
    )
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    named = config.get("added_tokens_decoder") or {}
    added = []
    for number in range(len(ranks), len(ranks) + _ADDED):
        given = named.get(str(number), {})
        text = given.get("content", f"<|reserved_token_{number}|>")
        special = bool(given.get("special", False))
        added.append(AddedToken(text, normalized=False, special=special))
    made.add_tokens(added)
    return made


def rank_count(folder: Path) -> int:
    """The ids of a folder that has only `tiktoken.model`, added tokens included. Raises:
    VerifierError, as `fast_form` does."""
    read_config(folder)
    return len(read_ranks(folder / RANKS)) + _ADDED


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token → rank, in the order of ranks.

    Raises:
        VerifierError: the file is none of tiktoken's, or its ranks are not 0, 1, 2, ….
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise VerifierError(f"{path} cannot be read as tiktoken's ranks: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(ranks):
        raise VerifierError(f"{path}: its ranks are not 0, 1, 2, …, one a token")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise VerifierError(f"{path}: no token for the byte {missing[0]:#04x}")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def read_config(folder: Path) -> dict[str, Any]:
    """Kimi's tokenizer_config.json.

    Raises:
        VerifierError: it is missing, or does not say that it is Kimi's.
    """
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        kimi = config.get("tokenizer_class") == _CLASS
    except (OSError, ValueError, AttributeError):
        kimi = False
    if not kimi:
        raise VerifierError(
            f"{folder} has only {RANKS}, and no {CONFIG} that names {_CLASS}: how its text is "
            "split is not known; put the tokenizer.json made from it beside it"
        )
    return dict(config)


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that make each token, by its rank: tiktoken merges whichever pair makes the token
    of lowest rank, so that every way to make one has its place."""
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _alphabet() -> list[str]:
    """The character that byte-level vocabularies write for each byte: those that print stand for
    themselves (as Latin-1), the others for characters from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def pieces(text: str) -> Iterator[str]:
    """What Kimi's tokenizer encodes apart: 400,000 characters at most, and within these no more
    than 25,000 in a row that are all white space or all not. A longer text is cut there, which
    bounds the work, and costs a token now and then where it cuts a word."""
    for start in range(0, len(text), _PIECE):
        yield from _runs(text[start : start + _PIECE])


_PIECE, _RUN = 400_000, 25_000
_ALIKE = re.compile(r"\s+|\S+")


def _runs(text: str) -> Iterator[str]:
    start = 0
    if len(text) > _RUN:
        for run in _ALIKE.finditer(text):
            for cut in range(run.start() + _RUN, run.end(), _RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]
