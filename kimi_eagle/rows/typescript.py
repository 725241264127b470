"""Tools as TypeScript, the form in which Kimi-K2.5 was taught them. Pure.

    # Tools

    ## functions
    namespace functions {
    // What the weather is like.
    type weather = (_: {
      // Where.
      // maxLength: 80
      city: string,
      unit?: "C" | "F"
    }) => any;
    }

Kimi's published tokenizer hands this to its chat template as `tools_ts_str`, beside `tools` with
every key sorted; a tool that it cannot put this way makes it hand over `tools` alone, which the
template then writes as JSON. What is written here, and what is refused, is what it writes and
refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_STEP = "  "
_BETWEEN = ",\n"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_IN_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_VALUES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class NoTypeScript(ValueError):
    """A schema that has no TypeScript form."""


def sorted_keys(value: Any) -> Any:
    """A JSON value with the keys of every object in order."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [sorted_keys(item) for item in value]
    return value


def typescript(tools: Sequence[Any]) -> str:
    """Tools, given as OpenAI's function tools with sorted keys, as TypeScript; tools of other types
    are left out, as Kimi's tokenizer does.

    Raises:
        NoTypeScript: a schema that has no such form.
    """
    try:
        functions = [
            _function(tool["function"])
            for tool in tools
            if tool.get("type") == "function" and tool.get("function")
        ]
    except (AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise NoTypeScript(f"a schema of an unknown form: {error!r}") from None
    if not functions:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


@dataclass(frozen=True)
class _Type:
    """A type: how it is written at an indent, and what is said of it above."""

    write: Callable[[str], str]
    description: Any = ""
    constraints: Mapping[str, Any] = field(default_factory=dict)

    def comments(self, indent: str) -> str:
        lines = [_comment(self.description, indent)] if self.description else []
        if self.constraints:
            said = ", ".join(f"{name}: {value}" for name, value in sorted(self.constraints.items()))
            lines.append(f"{indent}// {said}")
        return "".join(line + "\n" for line in lines)


@dataclass(frozen=True)
class _Property:
    name: str
    type: _Type
    optional: bool
    default: Any

    def write(self, indent: str) -> str:
        said = self.type.comments(indent)
        if self.default is not None:
            plain = isinstance(self.default, int | float)
            shown = repr(self.default) if plain else json.dumps(self.default, ensure_ascii=False)
            said += f"{indent}// Default: {shown}\n"
        mark = "?" if self.optional else ""
        return f"{said}{indent}{self.name}{mark}: {self.type.write(indent)}"


class _Schemas:
    """Reads the JSON schemas of one function, with the definitions that they share."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_itself = False

    def read(self, schema: Any) -> _Type:
        if isinstance(schema, bool):
            return _plain("any" if schema else "null")
        said = schema.get("description", "")
        if "$ref" in schema:
            return _plain(self._reference(schema["$ref"]), said)
        if "anyOf" in schema:
            options = [self.read(option) for option in schema["anyOf"]]
            return _Type(lambda indent: " | ".join(item.write(indent) for item in options), said)
        if "enum" in schema:
            return _plain(_enumeration(schema), said)
        if "type" not in schema:
            if schema == {}:
                return _plain("any")
            raise NoTypeScript(f"a schema without a type: {schema}")
        kind = schema["type"]
        if isinstance(kind, list):
            return _plain(" | ".join(_IN_UNION[item] for item in kind), said)
        limits = {name: schema[name] for name in _CONSTRAINTS.get(kind, ()) if name in schema}
        if kind == "object":
            return self.object(schema)[0]
        if kind == "array":
            item = self.read(schema["items"]) if schema.get("items") else _plain("any")
            return _Type(lambda indent: _array(item, indent), said, limits)
        return _Type(lambda _: "number" if kind == "integer" else kind, said, limits)

    def object(self, schema: Mapping[str, Any]) -> tuple[_Type, list[_Property]]:
        """An object's type, and its properties in the schema's order."""
        self.definitions.update(schema.get("$defs") or {})
        more = schema.get("additionalProperties")
        others = self.read(more) if isinstance(more, Mapping) else more
        given = schema.get("properties", {})
        optional = set(given) - set(schema.get("required", []) if given else [])
        properties = [
            _Property(
                name,
                self.read(item),
                name in optional,
                item.get("default") if isinstance(item, Mapping) else None,
            )
            for name, item in given.items()
        ]
        shown = sorted(properties, key=lambda item: (item.optional, item.name))
        return (
            _Type(lambda indent: _object(shown, others, indent), schema.get("description", "")),
            properties,
        )

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self.refers_to_itself = True
            return "parameters"
        name = reference.split("/")[-1]
        if not reference.startswith("#/$defs/") or name not in self.definitions:
            raise NoTypeScript(f"a reference to nothing: {reference}")
        return name


def _function(function: Mapping[str, Any]) -> str:
    schemas = _Schemas()
    parameters, properties = schemas.object(function.get("parameters") or {})
    interfaces = []
    refers_to_itself = schemas.refers_to_itself  # definitions, read below, may do so too
    if refers_to_itself:
        # Here, and nowhere else, in the schema's order.
        inner = _BETWEEN.join(item.write(_STEP) for item in properties)
        inner = f"\n{inner}\n" if inner else ""
        interfaces.append(f"interface parameters {{{inner}}}")
    for defined, schema in dict(schemas.definitions).items():
        said = schema.get("description", "")
        above = _comment(said) + "\n" if said else ""
        interfaces.append(f"{above}interface {defined} {schemas.read(schema).write('')}")
    name, said = function.get("name", "function"), function.get("description")
    taken = "parameters" if refers_to_itself else parameters.write("")
    parts = ["\n".join(interfaces), _comment(said) if said else ""]
    return "\n".join([*filter(None, parts), f"type {name} = (_: {taken}) => any;"])


def _plain(text: str, description: Any = "") -> _Type:
    return _Type(lambda _: text, description)


def _comment(text: str, indent: str = "") -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _object(properties: Sequence[_Property], others: Any, indent: str) -> str:
    inner = indent + _STEP
    lines = [item.write(inner) for item in properties]
    if others is not None:
        if isinstance(others, _Type):
            other = others.write(inner)
        elif isinstance(others, bool):
            other = "any" if others else "never"
        else:
            raise NoTypeScript(f"additionalProperties: {others}")
        lines.append(f"{inner}[k: string]: {other}")
    return "{\n" + _BETWEEN.join(lines) + f"\n{indent}}}" if lines else "{}"


def _array(item: _Type, indent: str) -> str:
    said = item.comments(indent + _STEP)
    if not said:
        return f"Array<{item.write(indent)}>"
    return f"Array<\n{said}{indent}{_STEP}{item.write(indent + _STEP)}\n{indent}>"


def _enumeration(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [item for item in kind if item != "null"] if len(kind) == 2 else kind
        if len(kind) not in (1, 2) or (len(kind) == 2 and "null" not in kind):
            raise NoTypeScript(f"an enumeration of type {kind}")
        kind = named[0] if named else "null"
    for value in schema["enum"]:
        wanted = _VALUES.get(kind) if isinstance(kind, str) else None
        if value is not None and wanted is not None and not isinstance(value, wanted):
            raise NoTypeScript(f"{value!r} in an enumeration of type {kind}")
    return " | ".join(
        f'"{item}"' if isinstance(item, str) else str(item) for item in schema["enum"]
    )
