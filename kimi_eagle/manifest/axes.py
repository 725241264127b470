"""What a stage's `matrix` varies: its keys and their values, checked. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle.manifest.document import Document, Json
from kimi_eagle.manifest.problem import UNSET, Path, Problem, dotted

MATRIX = "matrix"


@dataclass(frozen=True)
class Axis:
    """One key of a matrix, and where it stands in the document."""

    stage: str
    parts: tuple[str, ...]
    """The keys that lead from the stage to what varies."""
    path: Path

    @property
    def key(self) -> str:
        return dotted(self.parts)


def axes_of(document: Document, stage: str) -> tuple[list[Axis], list[Problem]]:
    """What a stage's matrix varies, in order, and all that is wrong with it.

    Only what is right with it is returned; there is none where the stage has no matrix.
    """
    reader = _Reader(document)
    written = document.value(("stages", stage))
    axes = reader.axes(stage, written) if isinstance(written, dict) else []
    return axes, reader.problems


class _Reader:
    def __init__(self, document: Document):
        self.problems: list[Problem] = []
        self._document = document

    def _report(self, path: Path, message: str, **more: Any) -> None:
        self.problems.append(self._document.problem(path, message, **more))

    def axes(self, name: str, stage: Mapping[str, Json]) -> list[Axis]:
        where: Path = ("stages", name, MATRIX)
        matrix = stage.get(MATRIX, UNSET)
        if matrix is UNSET:
            return []
        if not isinstance(matrix, dict):
            self._report(where, "must be a mapping", hint="such as {lr: [1e-4, 3e-4]}")
            return []
        if not matrix:
            self._report(where, "must not be empty", hint="such as {lr: [1e-4, 3e-4]}")
        found: dict[tuple[str, ...], Axis] = {}
        for axis in self._listed(name, where, (), matrix):
            before = found.get(axis.parts)
            if before is not None and self._document.source(axis.path) is None:
                line, _ = self._document.locate_key(before.path)
                self._report(axis.path, f"repeated; first set on line {line}", at_key=True)
            elif self._is_right(axis, stage):
                found[axis.parts] = axis
        self._nested(found)
        return list(found.values())

    def _listed(
        self, stage: str, where: Path, parts: tuple[str, ...], matrix: Mapping[str, Json]
    ) -> Iterator[Axis]:
        """The keys of a matrix; a mapping in it goes one level further down, as a dot does."""
        for key, values in matrix.items():
            path, below = (*where, key), (*parts, *key.split("."))
            if isinstance(values, dict):
                yield from self._listed(stage, path, below, values)
            else:
                yield Axis(stage, below, path)

    def _is_right(self, axis: Axis, stage: Mapping[str, Json]) -> bool:
        """Whether an axis can be varied along; what is wrong with it is reported."""
        count = len(self.problems)
        values = self._document.value(axis.path)
        if axis.parts in (("kind",), (MATRIX,)):
            self._report(axis.path, "cannot vary", at_key=True, hint="write another stage")
        elif "" in axis.parts:
            message = "is no key of a stage"
            self._report(axis.path, message, at_key=True, hint="such as lr or draft.layers")
        elif not isinstance(values, list):
            self._report(axis.path, "must be a list of values", hint="such as [1, 2]")
        elif not values:
            self._report(axis.path, "must not be empty", hint="give it values, or leave it out")
        else:
            self._doubles(axis, values)
            self._placed(axis, stage)
        return len(self.problems) == count

    def _doubles(self, axis: Axis, values: Sequence[Json]) -> None:
        seen: dict[str, int] = {}
        for index, value in enumerate(values):
            first = seen.setdefault(_same(value), index)
            if first != index:
                message = f"the same value as {axis.key}.{first}"
                self._report((*axis.path, index), message, hint="leave one of them out")

    def _placed(self, axis: Axis, stage: Mapping[str, Json]) -> None:
        """Report where an axis meets what the stage says itself; an override comes later, and
        takes the place of it."""
        holder: Json = dict(stage)
        for depth, part in enumerate(axis.parts):
            if not isinstance(holder, dict):
                at = dotted(axis.parts[:depth])
                message = f"{at} is not a mapping there, so it has no {part!r}"
                self._report(axis.path, message, at_key=True)
                return
            if part not in holder:
                return
            holder = holder[part]
        own: Path = ("stages", axis.stage, *axis.parts)
        if self._document.source(axis.path) is not None and self._document.source(own) is None:
            return
        hint = f"to set it for all variants, write matrix.{axis.key}: [value]"
        self._report(own, "is in the matrix too", at_key=True, hint=hint)

    def _nested(self, found: dict[tuple[str, ...], Axis]) -> None:
        for parts in list(found):
            outer = [found[parts[:n]] for n in range(1, len(parts)) if parts[:n] in found]
            if outer:
                message = f"lies within {outer[0].key}, which varies too"
                self._report(found.pop(parts).path, message, at_key=True)


def _same(value: Json) -> str:
    """Equal for values that a manifest takes for the same: 1 and 1.0, but not 1 and true."""

    def plain(item: Json) -> Any:
        if isinstance(item, float) and math.isfinite(item) and item.is_integer():
            return int(item)
        if isinstance(item, list):
            return [plain(part) for part in item]
        if isinstance(item, dict):
            return {key: plain(item[key]) for key in sorted(item)}
        return item

    return repr(plain(value))
