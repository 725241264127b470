"""Validate a document against a pydantic model, without coercion and in plain words.

Pydantic locates an error by a `loc` that also names union members and discriminator tags. It is
followed through the model's annotations and the data at once, which tells those names from keys.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kimi_eagle.manifest.document import Document, Json
from kimi_eagle.manifest.problem import (
    UNSET,
    FieldProblem,
    FieldProblems,
    ManifestError,
    Path,
    Problem,
    closest,
    key_hint,
)

M = TypeVar("M", bound=BaseModel)

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
}
_CHOICES = ("literal_error", "enum")
_LIMITS = {
    "finite_number": "must be a finite number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "missing": "is required",
    "extra_forbidden": "unknown key",
}
_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_MAPPINGS = (dict, Mapping)


def validate(
    model: type[M], document: Document, *, strip: Callable[[Path], Path] | None = None
) -> M:
    """Return the document as a `model`.

    Values are taken as they are: true is no number, a number is no text, 2.0 is no whole number.
    `strip` is applied to every pydantic `loc` first, for models whose validators add to it.

    Raises:
        ManifestError: with every problem at once, each where the document has its cause.
    """
    faults: list[_Fault] = []
    result: M | None = None
    try:
        text = json.dumps(document.data, allow_nan=False)
        result = model.model_validate_json(text, strict=True)
    except ValidationError as error:
        for details in error.errors(include_url=False, include_input=False):
            loc = details["loc"] if strip is None else strip(details["loc"])
            faults.append(_trace(model, document.data, loc, details))
    problems = _settle(document, [fault for fault in faults if not _follows(fault, faults)], 0)
    known = {problem.path for problem in problems}
    for path, expected in _lookalikes(_shape(model), document.data, ()):
        if path not in known:
            problems.append(document.problem(path, _one_of(expected)))
    if problems or result is None:
        raise ManifestError(document.file, problems)
    return result


def may_hold_mapping(model: type[BaseModel], data: Json, path: Path) -> bool:
    """Tell whether `path`, of which `data` has the beginning, is a field that allows a mapping."""
    shape, value, holder = _shape(model), data, None
    for part in path:
        members = [_tagged(shape, value)] if shape.discriminator else shape.members
        holders = [core for member in members for core in _shape(member).members]
        holder = next((core for core in holders if _is_container(core, value)), Any)
        shape, value = _child(holder, part), _item(value, part)
    cores = [core for member in shape.members for core in _shape(member).members]
    return _is_model(holder) and any(_is_container(core, {}) for core in cores)


# Following a loc


@dataclass(frozen=True)
class _Shape:
    """What an annotation allows besides None: one type, or the members of a union."""

    members: tuple[Any, ...]
    discriminator: str | None = None


@dataclass(frozen=True)
class _Fault:
    """A pydantic error and where it stands.

    `owner` is the type that holds the last key of `path`, and `branches` are the plain unions
    passed on the way, each with the member that was tried.
    """

    error: ErrorDetails
    path: Path
    at_key: bool
    shape: _Shape
    owner: Any
    branches: tuple[tuple[Path, str | int], ...]


def _trace(model: type[BaseModel], data: Json, loc: Path, error: ErrorDetails) -> _Fault:
    shape, value, owner = _shape(model), data, None
    path: Path = ()
    branches: list[tuple[Path, str | int]] = []
    at_key = False
    for part in loc:
        if part == "[key]" and get_origin(owner) in _MAPPINGS:
            at_key = True
        elif shape.discriminator is not None:
            shape = _shape(_tagged(shape, value))
        elif len(shape.members) > 1:
            branches.append((path, part))
            shape = _shape(_labelled(shape.members, part, value))
        else:
            owner = shape.members[0]
            shape, value, path = _child(owner, part), _item(value, part), (*path, part)
    return _Fault(error, path, at_key, shape, owner, tuple(branches))


def _shape(annotation: Any, discriminator: Any = None) -> _Shape:
    """Look through Annotated, aliases, root models and Optional."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            for mark in annotation.__metadata__:
                discriminator = getattr(mark, "discriminator", None) or discriminator
            annotation = annotation.__origin__
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        elif _is_model(annotation) and issubclass(annotation, RootModel):
            root = annotation.model_fields["root"]
            annotation, discriminator = root.annotation, root.discriminator
        elif origin in (Union, UnionType):
            members = [arg for arg in get_args(annotation) if arg is not type(None)]
            if len(members) > 1:
                name = getattr(discriminator, "discriminator", discriminator)
                return _Shape(tuple(members), name if isinstance(name, str) else None)
            annotation = members[0]
        else:
            return _Shape((annotation,))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_container(annotation: Any, value: object) -> bool:
    """Tell whether the type holds items the way `value`, a list or a mapping, does."""
    origin = get_origin(annotation) or annotation
    if isinstance(value, dict):
        return origin in _MAPPINGS or _is_model(annotation)
    return isinstance(value, list) and origin in _SEQUENCES


def _fields(model: Any) -> dict[str, FieldInfo]:
    """Return a model's fields under the names that a document uses."""
    fields = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        fields[alias if isinstance(alias, str) else name] = field
    return fields


def _child(annotation: Any, part: str | int) -> _Shape:
    """Return what the type allows at one of its keys or indices; anything, if it says nothing."""
    if _is_model(annotation):
        field = _fields(annotation).get(str(part))
        return _Shape((Any,)) if field is None else _shape(field.annotation, field.discriminator)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in _MAPPINGS:
        return _shape(args[1])
    if origin is tuple and Ellipsis not in args:
        fits = isinstance(part, int) and part < len(args)
        return _shape(args[int(part)]) if fits else _Shape((Any,))
    return _shape(args[0]) if origin in _SEQUENCES else _Shape((Any,))


def _item(value: Json, part: str | int) -> Json:
    if isinstance(value, dict):
        return value.get(str(part))
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


def _members(shape: _Shape) -> Iterator[tuple[Any, str, tuple[Any, ...]]]:
    """Yield a discriminated union's models, each with its discriminator key and tags."""
    for member in shape.members:
        inner = _shape(member)
        if len(inner.members) > 1:
            yield from _members(replace(inner, discriminator=shape.discriminator))
            continue
        model = inner.members[0]
        for key, field in _fields(model).items():
            if field is model.model_fields.get(shape.discriminator):
                yield model, key, get_args(field.annotation)


def _tagged(shape: _Shape, value: Json) -> Any:
    """Return the member of a discriminated union that the value's tag selects."""
    for model, key, tags in _members(shape):
        if _item(value, key) in tags:
            return model
    return Any


def _labelled(members: Iterable[Any], label: str | int, value: Json) -> Any:
    """Return the union member that pydantic calls `label`, as far as it can hold items."""
    candidates = [_shape(member).members[0] for member in members]
    for member in candidates:
        if label in (getattr(member, "__name__", None), str(member)):
            return member
    return next((member for member in candidates if _is_container(member, value)), Any)


# Values that pydantic takes for a literal although their types differ


def _lookalikes(shape: _Shape, value: Json, path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield values such as true where the model says `Literal[1]`, with what was expected.

    Python holds them equal, and pydantic goes by that even when it is strict.
    """
    if not _holds_numbers(shape):
        return
    if shape.discriminator is not None:
        shape = _shape(_tagged(shape, value))
    members = [core for member in shape.members for core in _shape(member).members]
    if isinstance(value, dict | list):
        holders = [member for member in members if _is_container(member, value)]
        if len(holders) == 1:
            for part, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _lookalikes(_child(holders[0], part), item, (*path, part))
        return
    literals = [
        arg for member in members if get_origin(member) is Literal for arg in get_args(member)
    ]
    equal = [type(literal) for literal in literals if literal == value]
    if equal and type(value) not in equal and not {bool, int, float} & set(members):
        yield path, [_literal(literal) for literal in literals]


def _holds_numbers(shape: _Shape, within: tuple[Any, ...] = ()) -> bool:
    """Tell whether a literal that is a number or a truth value is allowed at, or anywhere below."""
    for core in (core for member in shape.members for core in _shape(member).members):
        if get_origin(core) is Literal:
            below = any(isinstance(arg, int | float) for arg in get_args(core))
        elif _is_model(core):
            below = core not in within and any(
                _holds_numbers(_shape(field.annotation, field.discriminator), (*within, core))
                for field in core.model_fields.values()
            )
        else:
            below = any(_holds_numbers(_shape(arg), within) for arg in get_args(core))
        if below:
            return True
    return False


def _literal(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


# Saying what is wrong


def _settle(document: Document, faults: list[_Fault], depth: int) -> list[Problem]:
    """Turn faults into problems, with one answer for each plain union that nothing fitted.

    `depth` counts the unions on the way to these faults that are settled already.
    """
    problems: list[Problem] = []
    unions: defaultdict[Path, defaultdict[str | int, list[_Fault]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for fault in faults:
        if len(fault.branches) > depth:
            path, label = fault.branches[depth]
            unions[path][label].append(fault)
        else:
            problems += _problems(document, fault)
    for path, members in unions.items():
        meant = [tried for tried in members.values() if not _is_other_kind(tried, path)]
        if meant:
            problems += _settle(document, min(meant, key=len), depth + 1)
        else:
            firsts = [tried[0].error for tried in members.values()]
            problems.append(_neither(document, path, firsts))
    return problems


def _follows(fault: _Fault, faults: list[_Fault]) -> bool:
    """Tell whether a length is wrong only since pydantic left bad items out of the count."""
    path = fault.path
    return fault.error["type"] in ("too_short", "too_long") and any(
        len(other.path) > len(path) and other.path[: len(path)] == path for other in faults
    )


def _is_other_kind(faults: list[_Fault], path: Path) -> bool:
    """Tell whether a union member failed since the value is of another kind altogether."""
    kind = faults[0].error["type"]
    return faults[0].path == path and (kind in _KINDS or kind in _CHOICES)


def _neither(document: Document, path: Path, errors: list[ErrorDetails]) -> Problem:
    alternatives: dict[str, None] = {}
    for error in errors:
        kind = _KINDS.get(error["type"])
        alternatives.update(dict.fromkeys([kind] if kind else _expected(error)))
    *others, last = alternatives
    message = f"must be {', '.join(others)} or {last}" if others else f"must be {last}"
    found = document.value(path)
    hint = _spelling(found, alternatives)
    if "text" in alternatives:
        hint = _quoting(found)
    return document.problem(path, message, hint=hint)


def _expected(error: ErrorDetails) -> list[str]:
    """Return the values that pydantic says it allows: "'a', 'b' or 'c'"."""
    context = error.get("ctx", {})
    return re.split(", | or ", context.get("expected_tags") or context["expected"])


def _one_of(expected: list[str]) -> str:
    one_of = "one of " if len(expected) > 1 else ""
    return f"must be {one_of}{', '.join(expected)}"


def _spelling(found: object, expected: Iterable[str]) -> str | None:
    if not isinstance(found, str):
        return None
    match = closest(found, [text[1:-1] for text in expected if text[0] in "'\""])
    return f"did you mean {match!r}?" if match is not None else None


def _quoting(found: object) -> str | None:
    return "quote it" if isinstance(found, int | float) else None


def _problems(document: Document, fault: _Fault) -> list[Problem]:
    error, path = fault.error, fault.path
    kind, context = error["type"], error.get("ctx", {})
    raised = context.get("error")
    if isinstance(raised, FieldProblem | FieldProblems):
        each = (raised,) if isinstance(raised, FieldProblem) else raised.problems
        return [
            _without_mapping(document.problem((*path, *one.path), str(one), hint=one.hint))
            for one in each
        ]
    if isinstance(raised, Exception):
        return [_without_mapping(document.problem(path, str(raised)))]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return [_tag_problem(document, fault)]
    found = document.value(path)
    message, hint = _message(error), None
    if kind == "extra_forbidden" and _is_model(fault.owner):
        hint = key_hint(str(path[-1]), _fields(fault.owner))
    elif kind in _CHOICES:
        hint = _spelling(found, _expected(error))
    elif kind == "string_type":
        hint = _quoting(found)
    elif kind == "int_type" and isinstance(found, float) and found.is_integer():
        hint = f"write {int(found)}"
    problem = document.problem(
        path, message, hint=hint, at_key=fault.at_key or kind == "extra_forbidden"
    )
    if fault.at_key:
        problem = replace(problem, message=f"the key {message}", found=path[-1])
    return [problem]


def _without_mapping(problem: Problem) -> Problem:
    """Leave out a found mapping, of which a validator's own message says what matters."""
    return replace(problem, found=UNSET) if isinstance(problem.found, dict) else problem


def _tag_problem(document: Document, fault: _Fault) -> Problem:
    """Say what the key that selects a union's member must be."""
    members = list(_members(fault.shape))
    expected = [_literal(tag) for _, _, tags in members for tag in tags]
    path = (*fault.path, members[0][1])
    found = document.value(path)
    if found is UNSET:
        return document.problem(path, "is required", hint=f"one of {', '.join(expected)}")
    return document.problem(path, _one_of(expected), hint=_spelling(found, expected))


def _message(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}"
    if kind in _CHOICES:
        return _one_of(_expected(error))
    if context.get("min_length") == 1:
        return "must not be empty"
    if kind in _LIMITS:
        numbers = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in context.items()
        }
        return _LIMITS[kind].format(**numbers)
    return re.sub("^(Input|String|Value) should", "must", error["msg"])
