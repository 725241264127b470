"""What set each value of a run's config: `--set`, the manifest, a matrix, or a default. Pure.

A resolved manifest has every default written out; what was written by hand is found again by its
path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from kimi_eagle.difference import flat
from kimi_eagle.manifest.names import BETWEEN

SET, MANIFEST, MATRIX, DEFAULT = "--set", "manifest", "matrix", "default"
_VARIANT = re.compile(rf"^(stages\.[^.]+?){BETWEEN}[^.]*(\..*)?$")


@dataclass(frozen=True)
class Value:
    """One value of a config, by its dotted path, and what set it."""

    path: str
    value: Any
    layer: str


def layers(text: str, overrides: Sequence[str], resolved: Mapping[str, Any]) -> list[Value]:
    """The leaves of a resolved manifest in its order.

    Args:
        text: the manifest as it was submitted.
        overrides: `path=value`, as they were given to `--set`.
    """
    written = _written(text)
    given = [item.partition("=")[0].strip() for item in overrides]
    return [
        Value(path, value, _layer(path, written, given)) for path, value in flat(resolved).items()
    ]


def _layer(path: str, written: frozenset[str], given: Sequence[str]) -> str:
    plain = _VARIANT.sub(r"\1\2", path)
    if any(_below(plain, item) or _below(path, item) for item in given):
        return SET
    if _is_written(path, written) or (plain == path and _is_written(plain, written)):
        return MANIFEST
    if plain != path:
        stage, _, rest = plain.removeprefix("stages.").partition(".")
        if any(_below(rest, axis) for axis in _axes(stage, written)):
            return MATRIX
        if _is_written(plain, written):
            return MANIFEST
    return DEFAULT


def _is_written(path: str, written: frozenset[str]) -> bool:
    """Whether the manifest has this path, or a value above it that stands for it all."""
    return path in written or any(
        path[:dot] in written for dot, char in enumerate(path) if char == "."
    )


def _axes(stage: str, written: frozenset[str]) -> list[str]:
    start = f"stages.{stage}.matrix."
    return [item.removeprefix(start) for item in written if item.startswith(start)]


def _below(path: str, item: str) -> bool:
    return path == item or path.startswith(f"{item}.")


def _written(text: str) -> frozenset[str]:
    """The dotted paths of all leaves in a manifest's text."""
    try:
        document = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 (it makes text alone)
    except yaml.YAMLError:
        return frozenset()
    return frozenset(flat(document)) if isinstance(document, dict) else frozenset()
