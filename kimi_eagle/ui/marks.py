"""Words for states with their glyphs: never colour alone. Pure."""

from __future__ import annotations

# Word → (glyph, tone); the tones are classes of the style sheet.
_MARKS = {
    "done": ("✓", "good"),
    "executed": ("✓", "good"),
    "identical": ("✓", "good"),
    "reproduced": ("✓", "good"),
    "comparable": ("✓", "good"),
    "present": ("●", "good"),
    "reused": ("↺", "quiet"),
    "external": ("⇥", "quiet"),
    "running": ("▶", "busy"),
    "failed": ("✗", "bad"),
    "missing": ("✗", "bad"),
    "not comparable": ("✗", "bad"),
    "lost": ("?", "bad"),
    "interrupted": ("■", "warn"),
    "evicted": ("○", "warn"),
    "waiting": ("…", "quiet"),
}


def mark(state: str) -> tuple[str, str]:
    """(glyph, tone) of a state."""
    return _MARKS.get(state, ("•", "quiet"))
