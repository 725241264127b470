"""`matrix:` on a stage: named variants of it, each an ordinary stage. Pure.

    draft: {kind: train, head: head, states: states, vocab: vocab,
            matrix: {lr: [1e-4, 3e-4], draft.layers: [1, 2]}}
    score: {kind: evaluate, checkpoint: draft, prompts: {path: prompts.jsonl}}

is read as if it said `draft--lr-1e-4--layers-1`, `draft--lr-1e-4--layers-2`, … and
`score--lr-1e-4--layers-1` with that one for its checkpoint, …: the document is expanded before it
is validated, so that a variant's key is that of the same stage written by hand. A stage that takes
from a stage with variants has one variant for each of them; one that takes from several has one
for each that agree in what they come from. A reference that names a variant takes that one alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kimi_eagle.manifest.axes import MATRIX, Axis, axes_of
from kimi_eagle.manifest.document import Document, Json, Location
from kimi_eagle.manifest.names import BETWEEN, LONGEST, variant_name
from kimi_eagle.manifest.problem import UNSET, Path, Problem
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import Reference

MOST = 256
"""The most variants that a stage may have."""


@dataclass(frozen=True)
class Variant:
    """One stage of the expanded document."""

    name: str
    stage: str
    """The stage that it is a variant of."""
    choices: Mapping[Axis, int]
    """Of everything that varies in it and in what it comes from, which value it has."""
    varied: tuple[Axis, ...]
    """What tells it from the other variants of its stage."""
    links: Mapping[str, str]
    """Reference → the variant that it takes from."""
    named: frozenset[Axis] = frozenset()
    """What does not tell it from the others, since the stage names the variants it takes."""


@dataclass(frozen=True)
class Expansion:
    """A document without any `matrix`, and how its stages came about."""

    document: Document
    source: Document
    """The document as it was written."""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """By name; empty where nothing varies."""
    problems: tuple[Problem, ...] = ()

    def origin(self, path: Path) -> Path:
        """Where the document as written has what the expanded one has at `path`."""
        variant = self.variants.get(str(path[1])) if path[:1] == ("stages",) and path[1:] else None
        if variant is None:
            return path
        rest = path[2:]
        own = {axis: i for axis, i in variant.choices.items() if axis.stage == variant.stage}
        for axis, index in own.items():
            if rest[: len(axis.parts)] == axis.parts:
                return (*axis.path, index, *rest[len(axis.parts) :])
        written: Path = ("stages", variant.stage, *rest)
        if rest and self.source.value(written) is UNSET:
            # It may be a mapping that is there for what varies in it.
            return next((a.path for a in own if a.parts[: len(rest)] == rest), written)
        return written

    def told(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems of the expanded document as those of the written one, each of them once."""
        if not self.variants:
            return list(problems)
        found: dict[Path, dict[str, Problem]] = {}
        for problem in problems:
            path = self.origin(problem.path)
            if problem.message == "unknown key" and isinstance(path[-1], int):
                path = path[:-1]  # the key is wrong, whatever its values
            found.setdefault(path, {}).setdefault(problem.message, replace(problem, path=path))
        return [problem for messages in found.values() for problem in messages.values()]

    def twins(self, counts: Callable[[str], object]) -> Iterator[Problem]:
        """A problem for every variant that would make what another one of its stage makes.

        Args: `counts`: of a variant's name, all that decides what it makes.
        """
        seen: dict[tuple[str, str], Variant] = {}
        for variant in self.variants.values():
            first = seen.setdefault((variant.stage, repr(counts(variant.name))), variant)
            own = [axis for axis in variant.choices if axis.stage == variant.stage]
            differing = [a for a in own if first.choices[a] != variant.choices[a]]
            if first is not variant and differing:
                path = (*differing[0].path, variant.choices[differing[0]])
                message = f"'{variant.name}' would make the same as '{first.name}'"
                yield self.source.problem(path, message, hint="vary what counts, or leave one out")


def may_hold_axis(_data: Json, path: Path) -> bool:
    """Whether an override may make `path` a mapping since it is, or is in, a stage's matrix."""
    return len(path) >= 3 and path[0] == "stages" and path[2] == MATRIX


def expand(document: Document) -> Expansion:
    """Replace every stage that has a matrix, or takes from one that has, by its variants.

    Where a matrix is wrong (see `problems`) its stage is left as if it had none.
    """
    stages = document.data.get("stages")
    if not isinstance(stages, dict) or not any(
        isinstance(stage, dict) and MATRIX in stage for stage in stages.values()
    ):
        return Expansion(document, document)
    expander = _Expander(document, stages)
    variants = {v.name: v for name in stages for v in expander.variants(name) if v.varied}
    problems = [*expander.problems, *_clashes(document, stages, expander)]
    written = _Writer(document, expander).document()
    return Expansion(written, document, variants, tuple(problems))


class _Expander:
    """Finds the variants of every stage."""

    def __init__(self, document: Document, stages: Mapping[str, Json]):
        self.problems: list[Problem] = []
        self._document = document
        self._stages = stages
        self._found: dict[str, list[Variant]] = {}
        self._open: set[str] = set()
        self.axes: dict[str, list[Axis]] = {}
        for name in stages:
            self.axes[name], wrong = axes_of(document, name)
            self.problems += wrong

    def variants(self, name: str) -> list[Variant]:
        """The variants of a stage; one that does not vary is its own only variant."""
        if name not in self._found:
            if name in self._open:  # it takes from itself, which its references are refused for
                return [Variant(name, name, {}, (), {})]
            self._open.add(name)
            self._found[name] = self._variants(name)
            self._open.discard(name)
        return self._found[name]

    def _variants(self, name: str) -> list[Variant]:
        rows = [Variant(name, name, {}, (), {})]
        varying = {axis.parts for axis in self.axes[name]}
        fields = self._references(name)
        for reference, target in fields.items():
            if (reference,) not in varying and len(rows) <= MOST:
                rows = [taken for row in rows for taken in self._taking(row, reference, target)]
        for axis in self.axes[name]:
            if len(rows) > MOST:
                break
            rows = [varied for row in rows for varied in self._along(row, axis, fields)]
        if len(rows) > MOST:
            where = ("stages", name, *([MATRIX] if self.axes[name] else []))
            message = f"makes more than {MOST} variants"
            wrong = self._document.problem(where, message, hint="vary less at a time")
            self.problems.append(replace(wrong, found=UNSET))
        elif rows:
            return [replace(row, name=self._name(row)) for row in rows]
        return [Variant(name, name, {}, (), {})]

    def _taking(self, row: Variant, reference: str, target: Json) -> Iterator[Variant]:
        """A stage that takes from another: one for each variant of that which goes with what the
        stage comes from already."""
        options, pinned = self._options(target) if isinstance(target, str) else ([], True)
        if not options:
            yield row
        for option in options:
            if all(row.choices.get(axis, i) == i for axis, i in option.choices.items()):
                named = row.named | set(option.choices) if pinned else row.named
                varied = dict.fromkeys([*row.varied, *option.varied])
                yield replace(
                    row,
                    choices={**row.choices, **option.choices},
                    varied=tuple(axis for axis in varied if axis not in named),
                    links={**row.links, reference: option.name},
                    named=named,
                )

    def _along(self, row: Variant, axis: Axis, references: Collection[str]) -> Iterator[Variant]:
        """A stage at each value of one of its axes."""
        for index, value in enumerate(self._values(axis)):
            at = replace(row, choices={**row.choices, axis: index}, varied=(*row.varied, axis))
            if len(axis.parts) == 1 and axis.parts[0] in references:
                yield from self._taking(at, axis.parts[0], value)
            else:
                yield at

    def _name(self, row: Variant) -> str:
        labels = _labels(row.varied)
        values = [self._values(axis)[row.choices[axis]] for axis in row.varied]
        choices = list(zip(labels, values, strict=True))
        return variant_name(row.stage, choices) if choices else row.stage

    def _options(self, target: str) -> tuple[list[Variant], bool]:
        """The variants that a reference may take, and whether it names one of them."""
        if target in self._stages:
            return self.variants(target), False
        for base in self._stages:
            if target.startswith(base[: LONGEST // 2]) and BETWEEN in target:
                named = [v for v in self.variants(base) if v.name == target]
                if named:
                    return named, True
        return [Variant(target, target, {}, (), {})], False

    def _references(self, name: str) -> dict[str, str | None]:
        """The fields by which a stage names others, and whom they name."""
        stage = self._stages[name]
        kind = KINDS.get(str(stage.get("kind"))) if isinstance(stage, dict) else None
        if kind is None or not isinstance(stage, dict):
            return {}
        found: dict[str, str | None] = {}
        for key, info in kind.params.model_fields.items():
            if any(isinstance(mark, Reference) for mark in info.metadata):
                target = stage.get(key)
                found[key] = target if isinstance(target, str) else None
        return found

    def _values(self, axis: Axis) -> list[Json]:
        values = self._document.value(axis.path)
        assert isinstance(values, list), "an axis has a list of values"
        return values


def _labels(axes: Sequence[Axis]) -> list[str]:
    """What each axis is called in a name: its last key, or as much as tells it from the others."""
    forms = [
        (axis.parts[-1], "-".join(axis.parts), "-".join([axis.stage, *axis.parts])) for axis in axes
    ]
    labels = []
    for form in forms:
        short, key, whole = form
        if sum(other[0] == short for other in forms) == 1:
            labels.append(short)
        else:
            labels.append(key if sum(other[1] == key for other in forms) == 1 else whole)
    return labels


def _clashes(
    document: Document, stages: Mapping[str, Json], expander: _Expander
) -> Iterator[Problem]:
    """Names that two stages of the expanded document would have."""
    known = {name: name for name in stages}
    for name in stages:
        for variant in expander.variants(name):
            if variant.varied and known.setdefault(variant.name, name + BETWEEN) in stages:
                message = f"a variant of '{name}' has this name"
                path: Path = ("stages", variant.name)
                yield document.problem(path, message, at_key=True, hint="give the stage another")


class _Writer:
    """Writes the expanded document, in which everything has the place where it was written."""

    def __init__(self, source: Document, expander: _Expander):
        self._source = source
        self._expander = expander
        self._values: dict[Path, Location] = {}
        self._keys: dict[Path, Location] = {}
        self._by_stage: dict[str, list[tuple[bool, Path, Location]]] = {}
        for is_key, places in ((False, source.values), (True, source.keys)):
            for path, location in places.items():
                if path[:1] == ("stages",) and len(path) > 1:
                    listed = self._by_stage.setdefault(str(path[1]), [])
                    listed.append((is_key, path[2:], location))
                else:
                    self._put(is_key, path, location)

    def document(self) -> Document:
        stages = self._source.data["stages"]
        assert isinstance(stages, dict), "only then there is something to expand"
        written: dict[str, Json] = {}
        for name, stage in stages.items():
            for variant in self._expander.variants(name):
                if isinstance(stage, dict):
                    written[variant.name] = self._stage(variant, stage)
                else:
                    written[variant.name] = stage
                    self._copy(variant, ())
        data = {**self._source.data, "stages": written}
        return Document(self._source.file, data, self._values, self._keys)

    def _put(self, is_key: bool, path: Path, location: Location) -> None:
        (self._keys if is_key else self._values)[path] = location

    def _stage(self, variant: Variant, stage: Mapping[str, Json]) -> dict[str, Json]:
        plain = copy.deepcopy({key: item for key, item in stage.items() if key != MATRIX})
        axes = self._expander.axes[variant.stage]
        self._copy(variant, [axis.parts for axis in axes])
        for axis in axes:
            self._choose(variant, axis, plain)
        return {**plain, **variant.links}

    def _copy(self, variant: Variant, without: Sequence[tuple[str, ...]]) -> None:
        """Give a variant the places of its stage, but for its matrix and what that decides."""
        for is_key, rest, location in self._by_stage.get(variant.stage, ()):
            if rest[:1] != (MATRIX,) and not any(rest[: len(p)] == p for p in without):
                self._put(is_key, ("stages", variant.name, *rest), location)

    def _choose(self, variant: Variant, axis: Axis, plain: dict[str, Json]) -> None:
        """Set what varies along an axis to the variant's value, placed where that was written."""
        index = variant.choices.get(axis)
        if index is None:
            return  # the stage makes too many variants
        holder: dict[str, Json] = plain
        target: Path = ("stages", variant.name)
        key_place = self._source.key_location(axis.path)
        for part in axis.parts[:-1]:
            target = (*target, part)
            if part not in holder:
                self._put(True, target, key_place)
                self._put(False, target, key_place)
            below = holder.setdefault(part, {})
            assert isinstance(below, dict), "it was looked at before"
            holder = below
        target = (*target, axis.parts[-1])
        origin: Path = (*axis.path, index)
        holder[axis.parts[-1]] = copy.deepcopy(self._source.value(origin))  # type: ignore[assignment]
        self._put(True, target, key_place)
        self._put(False, target, self._source.value_location(origin))
        for is_key, rest, location in self._by_stage.get(variant.stage, ()):
            below_it = origin[2:]
            if len(rest) > len(below_it) and rest[: len(below_it)] == below_it:
                self._put(is_key, (*target, *rest[len(below_it) :]), location)
