"""One record of a source, and where it stands. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# A record of more bytes is left out and counted; nobody's context window is that long, and one
# record must not take the memory of the machine.
MAX_BYTES = 1 << 28

UNREADABLE, TRUNCATED, TOO_LARGE = "unreadable", "truncated", "record_too_large"


@dataclass(frozen=True)
class Record:
    """One record: its value, or why it has none."""

    number: int
    """From 1: the line of a .jsonl, the item of an array, the row of a table."""
    line: int | None = None
    """The line on which it begins; None in a table, which has no lines."""
    value: Any = None
    error: str | None = None
    reason: str | None = None
    """With an error, the name that it is counted under."""

    @property
    def in_table(self) -> bool:
        """Whether a table held it: there, what a struct lacks reads as null."""
        return self.line is None

    def place(self, file: str) -> str:
        return place(file, self.number, self.line)


def place(file: str, number: int, line: int | None) -> str:
    """A record's place for people: `chats.jsonl:17`, or with its number where that is another."""
    if line is None:
        return f"{file} (record {number})"
    return f"{file}:{line}" if number == line else f"{file}:{line} (record {number})"
