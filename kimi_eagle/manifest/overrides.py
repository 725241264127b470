"""Change single values of a document from the command line (`--set stages.draft.lr=1e-4`)."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from kimi_eagle.manifest.document import Document, Json, Location, parse_value
from kimi_eagle.manifest.problem import ManifestError, Path, Problem, key_hint

_INDEX = re.compile("0|[1-9][0-9]*")


class _NoPlaceError(Exception):
    """An override's path leads nowhere; `problem` says where it ends."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def _nowhere(_data: Json, _path: Path) -> bool:
    return False


def apply(
    document: Document,
    overrides: Iterable[str],
    may_hold_mapping: Callable[[Json, Path], bool] = _nowhere,
) -> Document:
    """Return a copy of `document` with each `path=value` set, later ones winning.

    A value is read as in the file. A new key may be added to a mapping that exists, or that is
    left out where `may_hold_mapping` allows one, and the result locates what was set, and all
    below it, at the override's text.

    Raises:
        ManifestError: with all overrides that are malformed, or lead to no place in the document.
    """
    problems: list[Problem] = []
    result = replace(document, data=copy.deepcopy(document.data))
    for text in overrides:
        source = f"--set {text}"
        name, equals, written = text.partition("=")
        parts = name.strip().split(".")
        if not equals or "" in parts:
            problems.append(Problem((), "must be path=value, such as a.b=1", source=source))
            continue
        try:
            container, key, path = _place(result.data, parts, source, may_hold_mapping)
        except _NoPlaceError as error:
            problems.append(error.problem)
            continue
        value, wrong = parse_value(written, path, source)
        problems += wrong
        if not wrong:
            container[key] = value  # type: ignore[index]
            result = _relocated(result, path, source)
    if problems:
        raise ManifestError(document.file, problems)
    return result


def _place(
    document: Json, parts: list[str], source: str, may_hold_mapping: Callable[[Json, Path], bool]
) -> tuple[dict[str, Json] | list[Json], str | int, Path]:
    """Return the container that an override changes, the key in it, and the whole path."""
    path: Path = ()
    data = document
    for part in parts[:-1]:
        container, key = _step(data, part, path, source)
        path = (*path, key)
        if isinstance(container, dict) and key not in container:
            if may_hold_mapping(document, path):
                data = container[str(key)] = {}
                continue
            raise _NoPlaceError(
                Problem(path, "no such key", hint=key_hint(part, container), source=source)
            )
        data = container[key]  # type: ignore[index]
    container, key = _step(data, parts[-1], path, source)
    return container, key, (*path, key)


def _step(
    data: Json, part: str, path: Path, source: str
) -> tuple[dict[str, Json] | list[Json], str | int]:
    """Read one part of a path as a key of `data`, or as an index that it has."""
    if isinstance(data, dict):
        return data, part
    if not isinstance(data, list):
        message = f"is neither a mapping nor a list, so it has no {part!r}"
        raise _NoPlaceError(Problem(path, message, found=data, source=source))
    if not _INDEX.fullmatch(part) or int(part) >= len(data):
        message = f"is a list of {len(data)} items, counted from 0, so it has no {part!r}"
        raise _NoPlaceError(Problem(path, message, source=source))
    return data, int(part)


def _relocated(document: Document, path: Path, source: str) -> Document:
    """Forget the file's locations at and below `path` in favour of the override."""
    location = Location(None, None, source)
    values = {p: at for p, at in document.values.items() if p[: len(path)] != path}
    keys = {p: at for p, at in document.keys.items() if p[: len(path)] != path}
    return replace(document, values={**values, path: location}, keys={**keys, path: location})
