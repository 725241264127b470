"""Write the pages and schemas that are made from the code, and the `schema.sql` that is made from
the migrations: `python docs/generate.py`.

A test holds the committed files equal to what this makes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kimi_eagle.cli import build_parser
from kimi_eagle.manifest.described import subclasses
from kimi_eagle.manifest.matrix import MATRIX
from kimi_eagle.manifest.model import json_schema
from kimi_eagle.outputs.catalog import OUTPUTS, file_of, schema_of
from kimi_eagle.registry.engine import migrate
from kimi_eagle.registry.schema import Database
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import EXTERNAL_PATH, OUTSIDE_KEY, Model, Reference

DOCS = Path(__file__).resolve().parent
_MADE = "<!-- Made by docs/generate.py from the code: edit that. -->\n"


_CLI = """\
Data goes to standard output, progress and errors to standard error. On a terminal tables fit its
width; in a pipe they are tab-separated, without a header, with whole hashes and exact times in
UTC. Colour: `--color`, then `NO_COLOR`, then `FORCE_COLOR`, then whether it is a terminal.
`--json` prints one document, whose schema `kimi-eagle schema --output COMMAND` prints and which
is linked below. A hash may be shortened to any unambiguous start."""

_MANIFEST = """\
One YAML 1.2 file: a verifier, and the stages that make a draft for it. Paths are relative to it.
Unknown keys are refused, and so is a value of another type: `true` is no number, and `1e-5` is
one. `kimi-eagle validate` names every problem at its line and column; `kimi-eagle schema` prints
the JSON Schema for editors."""

_KEYS = """\
What is marked *not in the key* is placement: it may change, and nothing runs again. All else is
part of what a stage *is*, with its default filled in; a path counts by what it holds."""

_MATRIX = """\
Every stage may have a `matrix`: key (nested ones with dots) → list of values. It makes a named
variant of the stage for each combination, and of those that take from it."""


def pages() -> dict[str, str]:
    """Path below docs → text."""
    return {
        "reference/cli.md": cli(),
        "reference/manifest.md": manifest(),
        **{
            f"schemas/{file_of(command)}": json.dumps(schema_of(command), indent=2) + "\n"
            for command in OUTPUTS
        },
        "../migrations/schema.sql": registry(),
    }


def registry() -> str:
    """The SQL of a database that the migrations have made."""
    with TemporaryDirectory() as folder:
        database = Database(Path(folder) / "registry.sqlite")
        migrate(database)
        with database.read() as connection:
            _begin, *statements, _commit = connection.iterdump()
        database.close()
    return "\n".join(["-- Made by `make schema` from the migrations.", *statements, ""])


# The command line


def cli() -> str:
    parser = build_parser()
    lines = [
        _MADE,
        "# Command line",
        "",
        "```",
        "kimi-eagle [--root DIR] [--color WHEN] COMMAND …",
        "```",
        "",
        _CLI,
        "",
        "| exit code | |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | a stage failed, or something is broken, damaged or differs |",
        f"| 2 | bad input: nothing was started ([what `--json` says then]({_schema('error')})) |",
        "| 130 | interrupted |",
        "",
        *_arguments(parser),
    ]
    for path, command in _commands(parser, ()):
        name = " ".join(path)
        lines += ["", f"## {name}", "", str(command.description), ""]
        lines += ["```", _usage(path, command), "```", "", *_arguments(command)]
        if name in OUTPUTS:
            lines += ["", f"`--json`: [schema]({_schema(name)})."]
    return "\n".join(lines).rstrip() + "\n"


def _schema(command: str) -> str:
    return f"../schemas/{file_of(command)}"


def _commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                deeper = any(
                    isinstance(item, argparse._SubParsersAction) for item in child._actions
                )
                if deeper:
                    yield from _commands(child, (*path, name))
                else:
                    yield (*path, name), child


def _usage(path: tuple[str, ...], parser: argparse.ArgumentParser) -> str:
    parts = ["kimi-eagle", *path]
    for action in _shown(parser):
        name = _name(action)
        if action.option_strings:
            taken = f"{action.option_strings[-1]} {name}" if action.nargs != 0 else ""
            text = taken or action.option_strings[-1]
            parts.append(text if action.required else f"[{text}]")
        elif action.nargs in ("+", "*"):
            parts.append(f"{name}…")
        else:
            parts.append(f"[{name}]" if action.nargs == "?" else name)
    return " ".join(parts)


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in _shown(parser):
        if action.option_strings:
            value = f" {_name(action)}" if action.nargs != 0 else ""
            name = ", ".join(f"`{option}{value}`" for option in action.option_strings)
        else:
            name = f"`{_name(action)}`"
        rows.append(f"| {_cell(name)} | {_cell(action.help or '')} |")
    return ["| | |", "|---|---|", *rows] if rows else []


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    below = not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    return [
        action
        for action in parser._actions
        # --color is said once, at the top.
        if not isinstance(action, hidden) and not (below and action.dest == "color")
    ]


def _name(action: argparse.Action) -> str:
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())


# Manifests


def manifest() -> str:
    schema = json_schema()
    parts = schema["$defs"]
    models = {model.__name__: model for model in subclasses(Model)}
    lines = [
        _MADE,
        "# Manifest",
        "",
        _MANIFEST,
        "",
        _KEYS,
        "",
        *_table(schema, "Manifest", models),
        "",
        _MATRIX,
    ]
    for name in ("VerifierSource", "Store", "LogOptions"):
        lines += _section(parts, name, models, {"VerifierSource": "verifier", "Store": "store"})
    for kind in KINDS.values():
        name = kind.params.__name__
        level = kind.determinism
        bound = f": {level.measure}" if level.measure else ""
        bound += f" ≤ {level.bound:g}" if level.bound is not None else ""
        lines += [
            "",
            f"## {kind.name}",
            "",
            f"{kind.summary[0].upper()}{kind.summary[1:]}. Makes `{kind.output}`.",
            "",
            f"Code version {kind.code_version}; a second run comes out {level.level}{bound}.",
            "",
            *_table(parts[name], name, models),
        ]
    used = {"VerifierSource", "Store", "LogOptions", *(k.params.__name__ for k in KINDS.values())}
    lines += ["", "## Parts", "", "What the tables above link to."]
    for name in sorted(parts.keys() - used):
        lines += _section(parts, name, models, {})
    return "\n".join(lines).rstrip() + "\n"


def _section(
    parts: Mapping[str, Any],
    name: str,
    models: Mapping[str, type[Model]],
    titles: Mapping[str, str],
) -> list[str]:
    title = titles.get(name, "logging" if name == "LogOptions" else name)
    level = "##" if title != name else "###"
    about = parts[name].get("description", "")
    return ["", f"{level} {title}", "", _prose(about), "", *_table(parts[name], name, models)]


def _table(schema: Mapping[str, Any], name: str, models: Mapping[str, type[Model]]) -> list[str]:
    fields = models[name].model_fields
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for key, value in schema["properties"].items():
        if key == MATRIX:
            continue
        marks = fields[key].metadata if key in fields else []
        notes = [_prose(value.get("description", ""))]
        for mark in marks:
            if isinstance(mark, Reference):
                notes.insert(0, f"A stage of kind {' or '.join(f'`{k}`' for k in mark.kinds)}.")
        notes += ["*Not in the key.*"] * (OUTSIDE_KEY in marks)
        notes += ["*Pinned by what it holds.*"] * (EXTERNAL_PATH in marks)
        required = fields[key].is_required() if key in fields else True
        default = "required" if required else f"`{_default(value)}`"
        text = _cell(" ".join(filter(None, notes)))
        lines.append(f"| `{key}` | {_cell(_type(value))} | {_cell(default)} | {text} |")
    return lines


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if isinstance(default, dict):
        return "{}" if not default else "{…}"
    return json.dumps(default)


def _type(value: Mapping[str, Any]) -> str:
    """A schema in words, with links to the parts that it names."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        anchor = {"VerifierSource": "verifier", "Store": "store", "LogOptions": "logging"}
        return f"[{name}](#{anchor.get(name, name.lower())})"
    if "const" in value:
        return f"`{json.dumps(value['const']).strip(chr(34))}`"
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    for union in ("anyOf", "oneOf"):
        if union in value:
            return " or ".join(dict.fromkeys(map(_type, value[union])))
    kind = value.get("type")
    if kind == "array":
        if "prefixItems" in value:
            return "list of " + ", ".join(map(_type, value["prefixItems"]))
        return f"list of {_type(value.get('items', {}))}"
    if kind == "object":
        inner = value.get("additionalProperties")
        inner = inner if isinstance(inner, dict) else None
        inner = inner or next(iter(value.get("patternProperties", {}).values()), None)
        if inner and "oneOf" in inner and len(inner["oneOf"]) == len(KINDS):
            return "mapping of names to stages"
        return f"mapping to {_type(inner)}" if inner else "mapping"
    words = {"integer": "whole number", "string": "text", "boolean": "true or false"}
    return str(words.get(str(kind), kind)) + _limits(value)


def _limits(value: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {value[name]:g}" for name, sign in signs.items() if name in value]
    found += [f"as `{value['pattern']}`"] if "pattern" in value else []
    return f" {', '.join(found)}" if found else ""


def _prose(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    """Text as a cell of a table, which a bar would end, within code too."""
    found = re.sub(
        "`([^`]*)`",
        lambda code: f"<code>{escape(code[1])}</code>" if "|" in code[1] else code[0],
        text,
    )
    return found.replace("|", "&#124;")


def main() -> None:
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
