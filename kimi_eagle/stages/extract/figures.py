"""The figures of workers that extracted a share each, as those of one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts add up; what was measured on probed positions is their mean by positions, but the
    error of fp8 and the convention that comes next, which are the worst that any saw."""
    probed = [part for part in parts if part["probed"]]
    positions = sum(part["probed"] for part in probed)
    agreed = sum(part["agreement"] * part["probed"] for part in probed)
    next_best = [part["next_best"] for part in probed if part["next_best"]]
    errors = [part["fp8_error"] for part in parts if part.get("fp8_error")]
    layers = {layer for error in errors for layer in error}
    return {
        **{
            name: sum(part[name] for part in parts)
            for name in ("rows_extracted", "tokens_extracted", "bytes_written")
        },
        "probed": positions,
        "agreement": agreed / positions if positions else None,
        "next_best": max(next_best, key=lambda found: found["agreement"], default=None),
        "refused": {key: why for part in parts for key, why in part["refused"].items()},
        "fp8_error": {
            layer: max(error[layer] for error in errors if layer in error)
            for layer in sorted(layers)
        },
    }
