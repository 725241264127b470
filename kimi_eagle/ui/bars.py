"""Acceptance lengths as bars: of what was served or of what was simulated, never of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kimi_eagle.terminal import cut

_WIDTH, _LEFT, _RIGHT, _ROW, _HEAD, _FOOT = 640, 230, 60, 22, 6, 24
_INNER = _WIDTH - _LEFT - _RIGHT


def served(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """What engines measured, with the standard error and what others publish for the set."""
    shown = [row for row in rows if row["acceptance_length"] is not None]
    return _bars(
        "Acceptance length as served, the bonus token included",
        [
            (
                f"{row['set']}, k {row['draft_tokens']}, T {row['temperature']:g}, {row['name']}",
                row["acceptance_length"],
                row["standard_error"],
                row["published"],
                bool(row["apart"]),
            )
            for row in shown
        ],
        max((row["draft_tokens"] + 1 for row in shown), default=2),
    )


def simulated(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """What a walk of the draft over stored hidden states gave, without an engine."""
    return _bars(
        "Acceptance length as simulated from stored hidden states",
        [(row["name"], row["acceptance_length"], None, None, bool(row["apart"])) for row in rows],
        max(((row["draft_tokens"] or 1) + 1 for row in rows), default=2),
    )


def _bars(
    title: str,
    rows: Sequence[tuple[str, float, float | None, Sequence[float] | None, bool]],
    most: float,
) -> Markup:
    if not rows:
        return Markup("")
    height = _HEAD + len(rows) * _ROW + _FOOT
    parts = []
    for tick in range(1, int(most) + 1):
        x = _x(tick, most)
        parts.append(
            Markup(
                '<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>'
                '<text class="tick" x="{0}" y="{3}" text-anchor="middle">{4}</text>'
            ).format(x, _HEAD, height - _FOOT, height - 8, tick)
        )
    for place, (name, value, error, reference, apart) in enumerate(rows):
        y = _HEAD + place * _ROW
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
                _LEFT - 8, y + 15, cut(name, 38)
            )
        )
        if reference is not None:
            low, high = (_x(end, most) for end in reference)
            parts.append(
                Markup(
                    '<rect class="published" x="{}" y="{}" width="{}" height="{}">'
                    "<title>published: {} to {}</title></rect>"
                ).format(low, y + 1, round(high - low, 1), _ROW - 2, *reference)
            )
        look = "bar apart" if apart else "bar"
        parts.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                look, _LEFT, y + 4, round(_x(value, most) - _LEFT, 1), _ROW - 8
            )
        )
        end = _x(value, most)
        if error is not None:
            low, end = _x(max(value - error, 1), most), _x(value + error, most)
            parts.append(
                Markup('<line class="error" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(
                    low, end, y + _ROW / 2
                )
            )
        parts.append(
            Markup('<text class="tick" x="{}" y="{}">{}</text>').format(
                end + 6, y + 15, f"{value:.3f}"
            )
        )
    return Markup(
        '<svg class="bars" viewBox="0 0 {} {}" role="img" aria-label="{}; the table has the '
        'figures">{}</svg>'
    ).format(_WIDTH, height, title, Markup("").join(parts))


def _x(value: float, most: float) -> float:
    return round(_LEFT + _INNER * (min(value, most) - 1) / (most - 1), 1)
