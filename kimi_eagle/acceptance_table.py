"""Acceptance lengths of several evaluations, side by side. Pure.

| set      | k | temperature | batch | 9c41e07a51c2 | 50aa3c18e0b4 | published |
|---|---|---|---|---|---|---|
| mt_bench | 3 | 0 | 1 | 2.412 ± 0.051, 1.42× | 2.587 ± 0.049, 1.51× | 2.62 to 2.94 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kimi_eagle.published import SOURCE, published

Line = tuple[str, int, float, int]
"""Set, draft tokens, temperature, batch: figures that can stand in one line of a table."""

_MEANING = (
    "acceptance length: tokens committed per draft step, pooled, the bonus token included; ± is "
    "the standard error over requests; × is speed with the draft over speed without"
)
_OF_A_SET = ("max_tokens", "thinking")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation as it was made."""

    name: str
    """What it is called in the table: the start of what was asked for."""
    digest: str
    document: Mapping[str, Any]
    """Its evaluation.json."""
    speeds: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def lines(self) -> dict[Line, Mapping[str, Any]]:
        measurements = self.document.get("measurements")
        if not measurements:  # made before there were several sets
            measurements = [{**self.document, "set": "prompts"}]
        return {_line(one): one for one in measurements}

    def speedup(self, line: Line) -> float | None:
        found = next((one for one in self.speeds if _line(one) == line), None)
        return found["speedup"] if found is not None else None


def _line(one: Mapping[str, Any]) -> Line:
    return one["set"], one["draft_tokens"], float(one["temperature"]), one.get("batch", 1)


@dataclass(frozen=True)
class Table:
    """Evaluations in the order they were asked for."""

    evaluations: Sequence[Evaluation]
    lines: Sequence[Line] = field(init=False)

    def __post_init__(self) -> None:
        every = {line: None for one in self.evaluations for line in one.lines}
        object.__setattr__(self, "lines", tuple(every))

    def header(self) -> list[str]:
        names = [one.name for one in self.evaluations]
        return ["set", "k", "temperature", "batch", *names, "published"]

    def rows(self) -> list[list[str]]:
        """The cells below the header."""
        return [
            [
                line[0],
                str(line[1]),
                f"{line[2]:g}",
                str(line[3]),
                *(_cell(one, line) for one in self.evaluations),
                _reference(line),
            ]
            for line in self.lines
        ]

    def notes(self) -> list[str]:
        """What the figures are, and what must not be held against each other."""
        notes = [_MEANING, *self._unlike()]
        for one in self.evaluations:
            document = one.document
            simulated, gap = (
                document.get(name) for name in ("simulated_acceptance_length", "simulated_gap")
            )
            if simulated is not None:
                apart = f", {gap:+.1%} of what was served" if gap is not None else ""
                notes.append(f"{one.name}: simulated from stored states {simulated:.3f}{apart}")
            if document.get("outputs_identical") is False:
                equal, asked = document.get("outputs_equal"), document.get("prompts")
                notes.append(f"{one.name}: only {equal} of {asked} outputs are as without it")
        if any(_reference(line) for line in self.lines):
            notes.append(f"published: {SOURCE}; other prompts and machines")
        return notes

    def _unlike(self) -> list[str]:
        """Why figures of one line are of different things."""
        return [reason for other in self.evaluations[1:] for reason in self.unlike(other)]

    def unlike(self, other: Evaluation) -> list[str]:
        """Why the figures of the first evaluation and another are of different things."""
        first = self.evaluations[0]
        one, two = first.document, other.document
        pair = f"{first.name} and {other.name} cannot be compared"
        old = [side.name for side in (first, other) if "verifier" not in side.document]
        if old:
            return [f"{pair}: {' and '.join(old)} does not say of what it was made"]
        found = []
        if one["verifier"] != two["verifier"]:
            found.append(f"{pair}: they are for different verifiers")
        shared = (one.get("sets") or {}).keys() & (two.get("sets") or {}).keys()
        sets = sorted(name for name in shared if one["sets"][name] != two["sets"][name])
        if sets:
            found.append(f"{pair} on {', '.join(sets)}: other prompts under the same name")
        unlike = [name for name in _OF_A_SET if one.get(name) != two.get(name)]
        if unlike:
            found.append(
                f"{pair}: "
                + ", ".join(f"{name} {one.get(name)} and {two.get(name)}" for name in unlike)
            )
        return found

    def markdown(self) -> str:
        header = self.header()
        lines = [header, ["---"] * len(header), *self.rows()]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n".join([table, "", *(f"- {note}" for note in self.notes())])

    def document(self) -> dict[str, Any]:
        """As `compare --json` prints it."""
        return {
            "evaluations": [
                {
                    "name": one.name,
                    "digest": one.digest,
                    "checkpoint": one.document.get("checkpoint"),
                    "simulated_acceptance_length": one.document.get("simulated_acceptance_length"),
                    "simulated_gap": one.document.get("simulated_gap"),
                }
                for one in self.evaluations
            ],
            "lines": [
                {
                    "set": line[0],
                    "draft_tokens": line[1],
                    "temperature": line[2],
                    "batch": line[3],
                    "published": list(published(line[0], line[1]) or ()) or None,
                    "figures": [_figures(one, line) for one in self.evaluations],
                }
                for line in self.lines
            ],
            "notes": self.notes(),
        }


_FIGURES = (
    "acceptance_length",
    "acceptance_length_per_request",
    "standard_error",
    "per_position",
    "draft_steps",
    "prompts",
    "outputs_equal",
)


def _figures(evaluation: Evaluation, line: Line) -> dict[str, Any] | None:
    found = evaluation.lines.get(line)
    if found is None:
        return None
    return {name: found.get(name) for name in _FIGURES} | {"speedup": evaluation.speedup(line)}


def _cell(evaluation: Evaluation, line: Line) -> str:
    found = evaluation.lines.get(line)
    if found is None:
        return "-"
    length, error = found.get("acceptance_length"), found.get("standard_error")
    if length is None:
        return f"none: {found.get('acceptance_length_reason')}"
    speedup = evaluation.speedup(line)
    return (
        f"{length:.3f}"
        + (f" ± {error:.3f}" if error is not None else "")
        + (f", {speedup:.2f}×" if speedup is not None else "")
    )


def _reference(line: Line) -> str:
    found = published(line[0], line[1])
    return "" if found is None else f"{found[0]:.2f} to {found[1]:.2f}"
