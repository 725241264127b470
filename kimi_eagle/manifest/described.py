"""What the docstrings below a model's fields say, for its JSON Schema.

Pydantic can do this when it makes a class (`use_attribute_docstrings`): it reads and parses the
source of every model each time that the program starts. Here it is done for a schema only.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel


def describe(schema: dict[str, Any], *models: type[BaseModel]) -> None:
    """Add the descriptions of fields to a schema in which each model goes by its class's name."""
    parts = {schema.get("title"): schema, **schema.get("$defs", {})}
    for model in models:
        properties = parts.get(model.__name__, {}).get("properties", {})
        for name, text in _docstrings(model):
            if name in properties:  # keys in order, as Pydantic has them
                entry = {"description": text, **properties[name]}
                properties[name] = dict(sorted(entry.items()))


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Every class that derives from a model, directly or not."""
    for child in model.__subclasses__():
        yield child
        yield from subclasses(child)


def _docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for base in model.__mro__:
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, after in pairwise(tree.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                yield field.target.id, inspect.cleandoc(after.value.value)
