"""Rendered text → token ids: each stretch between control tokens once, and text as text.

A tokenizer takes control tokens out before it looks at anything else, so that what lies between two
of them is encoded alike wherever it stands. Conversations render to much the same text turn after
turn; here only what is new is encoded. `whole` is the tokenizer's own call, to compare with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from kimi_eagle.rows.control import Control
from kimi_eagle.rows.conversations import Rejected

CONTROL_IN_TEXT = "control_token_in_text"
LONGEST_TEXT = 1_000_000
"""Characters that are encoded at once where nothing says that part of them is enough; more where
rows may be longer."""
_REMEMBERED = 1_000_000
"""Characters whose ids are kept for the next conversation."""


class Tokenizer(Protocol):
    """What is needed of transformers' tokenizers. Those that read text in Rust have
    `backend_tokenizer` too; tiktoken's, `encode_ordinary`."""

    all_special_tokens: list[str]
    all_special_ids: list[int]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> Any: ...

    def get_added_vocab(self) -> Mapping[str, int]: ...


class Encoder:
    """Encodes text of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, control: Control, longest: int = LONGEST_TEXT):
        """Args: `longest`: characters that are encoded at once, where nothing cuts them."""
        self._longest_text = longest
        self._tokenizer = tokenizer
        self._control = control
        added = tokenizer.get_added_vocab()
        self._ids = {token: added[token] for token in control.tokens}
        self._control_ids = frozenset(self._ids.values())
        self._endings = tuple(self._ids)
        self._pieces: Callable[[str], Iterable[str]] = getattr(tokenizer, "pieces", _uncut)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._known: dict[str, list[int]] = {}
        self._size = 0
        if self._backend is None:
            self._apart, self._longest = hasattr(tokenizer, "encode_ordinary"), 0
        else:
            self._apart, self._longest = _apart(self._backend), _longest(self._backend)
            self._backend.no_truncation()
            self._backend.no_padding()

    def whole(self, text: str) -> list[int]:
        """The ids of a text without marks, by the tokenizer's own call."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        # The same call without the offsets, which take as long again.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)

    def ids(self, text: str, mark: str = "", limit: int | None = None) -> list[int]:
        """The ids of a rendered text.

        Args:
            mark: what marks text that looks like control tokens; empty where there is none.
            limit: how many ids are enough. What goes beyond them is left out where that changes
                none of them.

        Raises:
            Rejected: a text that is too long to be encoded, or marked text that this tokenizer
                cannot encode as text.
        """
        if len(text) > self._longest_text and self._pieces is _uncut:
            raise Rejected("too_long", f"{len(text)} characters; {self._longest_text} are encoded")
        if not self._apart:
            if mark:
                raise Rejected(CONTROL_IN_TEXT, "which this tokenizer cannot encode as text")
            return self.whole(text)
        if self._backend is None and not mark:
            return self.whole(text)
        found: list[int] = []
        for stretch, control in self._control.split(text):
            if control:
                found.append(self._ids[stretch])
                continue
            looks_alike = bool(mark) and mark in stretch
            for piece in self._pieces(stretch.replace(mark, "") if looks_alike else stretch):
                if limit is not None and len(found) >= limit:
                    return found
                found += self._text(piece) if looks_alike else self._plain(piece)
        return found

    def prove(self, text: str, ids: Sequence[int], mark: str = "") -> bool:
        """Whether `ids`, made of stretches, are what the tokenizer makes of the text as a whole.

        Where text looks like control tokens, or is long enough to be cut, no call takes it whole:
        then the control tokens of `ids` must be those that the template wrote, in order.
        """
        if not self._apart:
            return True  # they were made of the whole
        stretches = list(self._control.split(text))
        if mark or any(
            len(list(self._pieces(item))) > 1 for item, control in stretches if not control
        ):
            written = [self._ids[item] for item, control in stretches if control]
            return written == [number for number in ids if number in self._control_ids]
        return self.whole(text) == list(ids)

    def ends_apart(self, text: str) -> bool:
        """Whether a text ends in a control token, so that its ids stay when more follows."""
        return self._apart and text.endswith(self._endings)

    def at_least(self, text: str) -> int:
        """A number of ids that a text has for certain, reckoned from its length alone; 0 where
        nothing is certain."""
        return len(text) // self._longest if self._longest else 0

    def _plain(self, text: str) -> list[int]:
        """The ids of text without control tokens."""
        known = self._known.get(text)
        if known is None:
            known = self.whole(text)
            self._size += len(text)
            if self._size > _REMEMBERED:
                self._known.clear()
                self._size = len(text)
            self._known[text] = known
        return known

    def _text(self, text: str) -> list[int]:
        """The ids of text that looks like control tokens."""
        found = self._ordinary(text)
        if not self._control_ids.isdisjoint(found):
            raise Rejected(CONTROL_IN_TEXT, "which this tokenizer reads as one in any case")
        return found

    @cached_property
    def _ordinary(self) -> Callable[[str], list[int]]:
        """Encodes text in which nothing is a control token."""
        if self._backend is None:
            ordinary: Callable[[str], list[int]] = self._tokenizer.encode_ordinary  # type: ignore[attr-defined]
            return ordinary
        form = json.loads(self._backend.to_str())
        for token in form["added_tokens"]:
            # The library passes over special tokens where it is told to, and over these alone.
            token["special"] = token["content"] in self._control.tokens
        plain = type(self._backend).from_str(json.dumps(form))
        plain.encode_special_tokens = True
        return lambda text: list(plain.encode(text, add_special_tokens=False).ids)


def _uncut(text: str) -> tuple[str]:
    return (text,)


def _part(backend: Any, name: str) -> list[dict[str, Any]]:
    """A part of a tokenizer as its JSON has it, step by step."""
    part = getattr(backend, name)
    form = json.loads(part.__getstate__()) if part is not None else {}
    return list(form.get("pretokenizers") or form.get("normalizers") or [form])


def _apart(backend: Any) -> bool:
    """Whether a tokenizer encodes what lies between control tokens alike wherever it stands: no
    added token takes the space around it, and nothing is put before a text's very beginning."""
    for token in backend.get_added_tokens_decoder().values():
        normalized = token.normalized and backend.normalizer is not None
        if token.lstrip or token.rstrip or token.single_word or normalized:
            return False
    return not any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
        for step in _part(backend, "pre_tokenizer")
    )


def _longest(backend: Any) -> int:
    """The most characters that a token stands for, where none is lost on the way to it: byte-level
    vocabularies that have every byte, without a normalizer. Otherwise 0."""
    from tokenizers import models, pre_tokenizers

    steps = _part(backend, "pre_tokenizer")
    losing = [
        step
        for step in steps
        if step.get("type") not in ("ByteLevel", "Split", "Digits")
        or step.get("behavior") == "Removed"
    ]
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if (
        losing
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or backend.normalizer is not None
        or not isinstance(backend.model, models.BPE)
        or not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    ):
        return 0
    return max(map(len, vocabulary))
