"""Text that can be encoded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_eagle.rows.buckets import Rejected


class Cleaner:
    """Replaces lone surrogates, which cannot be encoded, by U+FFFD, and counts them; pairs are
    joined by the JSON reader already."""

    def __init__(self) -> None:
        self.repaired = 0

    def text(self, text: str) -> str:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            pass
        else:
            return text
        self.repaired += sum(0xD800 <= ord(char) <= 0xDFFF for char in text)
        return "".join("\ufffd" if 0xD800 <= ord(char) <= 0xDFFF else char for char in text)

    def value(self, value: Any) -> Any:
        """The same for every text within a JSON value.

        Raises:
            Rejected: a value that JSON has not, as a table may hold (a time, bytes).
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return value
        raise Rejected("bad_message", f"a value that JSON has not: {value!r:.60}")
