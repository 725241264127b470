"""What was left out, counted by reason, with a few examples of each. Pure."""

from __future__ import annotations

from collections import Counter

_EXAMPLES = 3


class Rejects:
    """Counts what is left out."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, where: str, detail: str = "") -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{where} ({detail})" if detail else where)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def by_reason(self) -> dict[str, int]:
        return dict(sorted(self.counts.items()))

    def summary(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))

    def notes(self) -> list[str]:
        """A line for each reason, for people."""
        return [
            f"{self.counts[reason]} left out, {reason}: {', '.join(examples)}"
            for reason, examples in self.examples.items()
        ]
