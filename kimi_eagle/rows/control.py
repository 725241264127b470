"""Control tokens, and text that only looks like them. Pure.

A chat template writes control tokens (`<|im_end|>`) as text, and the tokenizer reads them there.
What people wrote is text, whatever it looks like: read as a control token, it would end a turn or
open one. So before a template renders anything, what looks like a control token in the messages is
marked, with a character that no text has; after it, the marks tell text from template, and go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# Unicode's noncharacters: they are for such use, and stand for nothing in any text.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Marks(Exception):
    """A text that has every mark there is."""


class Control:
    """The control tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[str]):
        self.tokens = frozenset(tokens)
        longest = sorted(self.tokens, key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")

    def find(self, text: str) -> str | None:
        """The first control token that a text would be read as."""
        found = self._pattern.search(text)
        return found[0] if found else None

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """A rendered text in order: (piece, whether it is a control token); none is empty."""
        start = 0
        for found in self._pattern.finditer(text):
            if found.start() > start:
                yield text[start : found.start()], False
            yield found[0], True
            start = found.end()
        if start < len(text):
            yield text[start:], False

    def mark(self, text: str, mark: str) -> str:
        """The text with a mark within everything that looks like a control token."""
        return self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)


def free_mark(value: Any) -> str:
    """A mark that no text within a JSON value has.

    Raises:
        Marks: there is none.
    """
    found = list(texts(value))
    for mark in _MARKS:
        if not any(mark in text for text in found):
            return mark
    raise Marks


def texts(value: Any) -> Iterator[str]:
    """Every text within a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text within it changed, names included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value
