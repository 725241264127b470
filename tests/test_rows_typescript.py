"""Tools as TypeScript. What is expected here is what Kimi-K2.5's published tokenizer writes."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_eagle.rows.typescript import NoTypeScript, sorted_keys, typescript


def _tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def _body(parameters: Any, **more: Any) -> str:
    text = typescript(sorted_keys([_tool(parameters, **more)]))
    before, after = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(before)
    assert text.endswith(after)
    return text[len(before) : -len(after)]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_required_properties_come_first_each_by_name_with_what_is_said_of_it() -> None:
    parameters = {
        **_object(
            unit={"type": "string", "enum": ["C", "F"], "default": "C"},
            days={"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            city={"type": "string", "description": "Where.\n\nA name.", "maxLength": 80},
        ),
        "required": ["city"],
    }
    assert _body(parameters, description="The weather.") == (
        "// The weather.\n"
        "type f = (_: {\n"
        "  // Where.\n"
        "\n"
        "  // A name.\n"
        "  // maxLength: 80\n"
        "  city: string,\n"
        "  // maximum: 9, minimum: 1\n"
        "  // Default: 3\n"
        "  days?: number,\n"
        '  // Default: "C"\n'
        '  unit?: "C" | "F"\n'
        "}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "boolean"}, "boolean"),
        ({"type": ["integer", "null", "object"]}, "number | null | {}"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "string | Array<any>"),
        ({"enum": ["a", 1, None, True]}, '"a" | 1 | None | True'),
        ({"type": "array", "items": {"type": "integer"}}, "Array<number>"),
        (
            {"type": "array", "items": {"type": "string", "description": "one"}},
            "Array<\n    // one\n    string\n  >",
        ),
        ({"type": "object"}, "{}"),
        ({"type": "object", "additionalProperties": False}, "{\n    [k: string]: never\n  }"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "{\n    [k: string]: number\n  }",
        ),
        ({}, "any"),
        (True, "any"),
        (False, "null"),
    ],
    ids=str,
)
def test_types(schema: Any, written: str) -> None:
    assert _body(_object(x=schema)) == f"type f = (_: {{\n  x?: {written}\n}}) => any;"


def test_definitions_are_interfaces_and_a_schema_that_refers_to_itself_is_one() -> None:
    parameters = {
        **_object(b={"$ref": "#"}, a={"$ref": "#/$defs/P"}),
        "$defs": {"P": {**_object(n={"type": "number"}), "description": "A point."}},
    }
    assert _body(parameters) == (
        "interface parameters {\n  a?: P,\n  b?: parameters\n}\n"
        "// A point.\ninterface P {\n  n?: number\n}\n"
        "type f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"$ref": "#/$defs/Missing"},
        {"$ref": "elsewhere.json"},
        {"type": "string", "enum": [1]},
        {"type": ["unheard of"]},
        {"type": "object", "additionalProperties": "yes"},
        "text",
    ],
    ids=str,
)
def test_what_has_no_form_is_refused(schema: Any) -> None:
    with pytest.raises(NoTypeScript):
        typescript([_tool(_object(x=schema))])


def test_tools_of_other_types_are_left_out() -> None:
    assert typescript([{"type": "_plugin", "name": "p"}, {"type": "function"}]) == ""
    assert typescript([]) == ""
    assert _body(None) == "type f = (_: {}) => any;"
