"""Two models' tensors side by side, by their norms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADER = ("TENSOR", "NORM_A", "NORM_B", "DIFFERENCE", "RELATIVE", "NOTE")


@dataclass(frozen=True)
class Weights:
    """The tensors of two models, each as `draft.norms.TensorNorms` has it."""

    tensors: tuple[Mapping[str, Any], ...]

    def shown(self, *, whole: bool) -> list[Mapping[str, Any]]:
        """Tensors that cannot be subtracted, then those that differ, those that differ most
        first; then the others, if `whole`."""
        listed = sorted(self.tensors, key=lambda item: -(item["relative"] or 0.0))
        unlike = [item for item in listed if item["difference"] is None]
        changed = [item for item in listed if item["difference"]]
        same = [item for item in listed if item["difference"] == 0]
        return [*unlike, *changed, *(same if whole else ())]

    def rows(self, *, whole: bool) -> list[tuple[str, ...]]:
        """As a table below `HEADER`."""
        return [
            (
                item["name"],
                *(_figure(item[field], 6) for field in ("a", "b", "difference")),
                _figure(item["relative"], 3),
                item["note"] or "",
            )
            for item in self.shown(whole=whole)
        ]


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
