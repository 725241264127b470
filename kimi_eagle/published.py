"""Acceptance lengths that others publish for EAGLE-3 drafts of Kimi-K2.5. Pure.

From the model cards of public drafts: a chain of 3 draft tokens, pooled, the bonus token included,
so 4.0 is the most. Ranges span the drafts; each was measured on its maker's machine and prompts.
They are lines of reference, not results of this project.
"""

from __future__ import annotations

DRAFT_TOKENS = 3
SOURCE = "model cards of public Kimi-K2.5 EAGLE-3 drafts, 3 draft tokens"

_RANGES: dict[str, tuple[float, float]] = {
    "mtbench": (2.62, 2.94),
    "gsm8k": (2.99, 3.27),
    "humaneval": (2.97, 3.36),
    "math500": (3.05, 3.47),
}


def published(name: str, draft_tokens: int) -> tuple[float, float] | None:
    """The lowest and the highest published for a set (`mt_bench`, `MT-Bench`, …); None where
    nothing is, or for another number of draft tokens."""
    plain = "".join(char for char in name.lower() if char.isalnum())
    return _RANGES.get(plain) if draft_tokens == DRAFT_TOKENS else None
