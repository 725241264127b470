"""What the JSON Schema of a manifest says of `matrix`: each key with the values that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_eagle.manifest.axes import MATRIX

_DESCRIPTION = (
    "Named variants of this stage, one for each combination of these values, that share everything "
    "above: key (nested ones with dots, draft.layers) → list of values. Stages that take from it "
    "have a variant for each of them."
)


def add_matrix(schema: dict[str, Any], stages: Mapping[str, Any]) -> None:
    """Let every kind of stage of a schema have a matrix.

    Args: `stages`: the schema of one stage, a union discriminated by kind.
    """
    parts = schema["$defs"]
    for reference in stages["discriminator"]["mapping"].values():
        kind = _resolved(parts, {"$ref": reference})
        keys = _keys(parts, kind, "")
        kind["properties"][MATRIX] = {
            "additionalProperties": False,
            "description": _DESCRIPTION,
            "minProperties": 1,
            "properties": keys,
            "type": "object",
        }
        others = [name for name in kind.get("required", ()) if name != "kind"]
        if others:  # what varies need not stand above
            kind["required"] = ["kind"]
            kind |= {"if": {"required": [MATRIX]}, "else": {"required": others}}


def _keys(
    parts: Mapping[str, Any], model: Mapping[str, Any], where: str
) -> dict[str, dict[str, Any]]:
    """Dotted key → schema of its list of values, for the fields of a model and of those in it."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in model["properties"].items():
        if not where and name == "kind":
            continue
        key = f"{where}{name}"
        plain = {k: v for k, v in field.items() if k not in ("default", "title", "description")}
        found[key] = {"items": plain, "minItems": 1, "type": "array", "uniqueItems": True}
        for option in [plain, *plain.get("anyOf", ())]:
            inner = _resolved(parts, option)
            if "properties" in inner:
                found |= _keys(parts, inner, f"{key}.")
    return found


def _resolved(parts: Mapping[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(schema) if not name else parts[name]
