"""What a view hands over to be shown, and the ways it may refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from kimi_eagle.registry.reading import ReadRegistry


@dataclass(frozen=True)
class View:
    """A page: the same things as a JSON document and as HTML."""

    template: str
    title: str
    document: Mapping[str, Any]
    """What `.json` gives."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the template needs beside it: drawings, records."""
    status: int = 200
    live: bool = False
    """Whether it may look otherwise in a moment."""
    csv: Callable[[], Iterable[Sequence[Any]]] | None = None
    """Gives the rows of its table, header first, where it has one to take away."""


@dataclass(frozen=True)
class Moved:
    """The page is at another address."""

    path: str


class NotThere(LookupError):
    """There is no such page; the message says why."""


@dataclass(frozen=True)
class Asked:
    """What a view is asked: of which registry, and by which query."""

    root: Path
    registry: ReadRegistry
    query: Mapping[str, Sequence[str]]

    def one(self, name: str, default: str = "") -> str:
        return (self.query.get(name) or [default])[-1]

    def all(self, name: str) -> list[str]:
        return [value for value in self.query.get(name, ()) if value]

    def number(self, name: str, default: int = 0, least: int = 0, most: int = 2**62) -> int:
        """A whole number of the query, within bounds; the default where it is none."""
        text = self.one(name)
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            return default
        return min(max(int(text), least), most)

    def flag(self, name: str) -> bool:
        return self.one(name) == "1"


def query_of(text: str) -> dict[str, list[str]]:
    """A query string as its values by name. Raises: NotThere: it has too many of them."""
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=200)
    except ValueError:
        raise NotThere("the address asks for more than 200 things at once") from None


def address(path: str, **query: Any) -> str:
    """A path with a query; what is None or empty is left out, lists are repeated."""
    pairs: list[tuple[str, str]] = []
    for name, value in query.items():
        values = value if isinstance(value, list | tuple) else [value]
        pairs += [(name, str(i)) for i in values if not (i is None or i is False or i == "")]
    told = quote(path, safe="/")
    return f"{told}?{urlencode(pairs)}" if pairs else told
