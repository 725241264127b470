"""What is wrong with a manifest, said in one line a problem."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[\w-]+")
_FOUND_LIMIT = 80


class _Unset(Enum):
    UNSET = "unset"


UNSET: Final = _Unset.UNSET
"""Stands for "no value", which None cannot: null is a value a manifest may hold."""


def dotted(path: Path) -> str:
    """Write a path as `stages.draft.layers.1`; keys that would be unclear are quoted."""
    return ".".join(
        str(part)
        if isinstance(part, int) or _PLAIN_KEY.fullmatch(part)
        else json.dumps(part, ensure_ascii=False)
        for part in path
    )


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` most likely misspells, or None."""
    by_form = {_form(choice): choice for choice in choices}
    matches = difflib.get_close_matches(_form(word), by_form, n=1)
    return by_form[matches[0]] if matches else None


def key_hint(key: str, allowed: Iterable[str]) -> str:
    """Return what to write instead of a wrong key: the likely one, or else all of them."""
    names = list(allowed)
    match = closest(key, names)
    if match is not None:
        return f"did you mean {match!r}?"
    return f"allowed keys: {', '.join(names)}" if names else "no keys are allowed here"


def _form(word: str) -> str:
    return word.lower().replace("-", "_")


def _one_line(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _shown(value: object) -> str:
    if isinstance(value, dict) and value:
        return "a mapping"
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _FOUND_LIMIT else f"{text[: _FOUND_LIMIT - 3]}..."


@dataclass(frozen=True)
class Problem:
    """One thing to fix.

    `line` and `column` count from 1. `found` is the offending value where there is one, and
    `source` the command-line text (`--set a.b=c`) that the value came from, if not the file.
    """

    path: Path
    message: str
    line: int | None = None
    column: int | None = None
    found: object = UNSET
    hint: str | None = None
    source: str | None = None

    def render(self, file: str) -> str:
        """Return the problem as one line that starts with where it is."""
        place = [file] if self.source is None else [self.source]
        place += [str(number) for number in (self.line, self.column) if number is not None]
        found = "" if self.found is UNSET else f" (found {_shown(self.found)})"
        hint = "" if self.hint is None else f"; {self.hint}"
        parts = [":".join(place), *([dotted(self.path)] if self.path else [])]
        return _one_line(": ".join([*parts, f"{self.message}{found}{hint}"]))

    def to_json(self) -> dict[str, object]:
        """Return the problem as JSON types; `found` is left out where no value was found."""
        found = {} if self.found is UNSET else {"found": self.found}
        return {
            "path": list(self.path),
            "message": self.message,
            "line": self.line,
            "column": self.column,
            **found,
            "hint": self.hint,
            "source": self.source,
        }


class ManifestError(Exception):
    """A manifest was refused; `problems` holds everything found wrong, in file order."""

    def __init__(self, file: str, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=_order))
        super().__init__(self.file, self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.render(self.file) for problem in self.problems)

    def to_json(self) -> dict[str, object]:
        """Return the file and its problems as JSON types."""
        return {"file": self.file, "problems": [problem.to_json() for problem in self.problems]}


def _order(problem: Problem) -> tuple[bool, int, int]:
    return problem.source is not None, problem.line or 0, problem.column or 0


class FieldProblem(ValueError):
    """Raised by a model's validator to point at one field.

    `path` is relative to what the validator checks: the model's own fields for a model
    validator.
    """

    def __init__(self, path: Path, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint


class FieldProblems(ValueError):
    """Raised by a model's validator that found several fields wrong."""

    def __init__(self, problems: Iterable[FieldProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))
