"""What commands print with --json, against its documented schema: every test's, as it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from kimi_eagle.outputs.catalog import OUTPUTS, schema_of


@cache
def validator(command: str) -> Draft202012Validator:
    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def name_of(arguments: Sequence[str]) -> str:
    """Which command a line is of."""
    for index, word in enumerate(arguments):
        for name in (" ".join(arguments[index : index + 2]), word):
            if name in OUTPUTS:
                return name
    raise AssertionError(f"{arguments}: no command whose output has a schema")


def check(arguments: Sequence[str], code: int, text: str) -> None:
    """Hold a command's output against its schema, where it has printed a document."""
    if "--json" not in arguments or not text.strip():
        return
    document: Any = json.loads(text.splitlines()[-1])
    refused = code == 2 and isinstance(document, dict) and document.get("status") == "error"
    name = "error" if refused else name_of(arguments)
    problems = [
        f"{error.json_path}: {error.message[:300]}"
        for error in validator(name).iter_errors(document)
    ]
    assert not problems, f"{' '.join(arguments)} does not print what its schema says: {problems}"
