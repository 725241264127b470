"""Exact UTC times, as text."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """Now, to the microsecond, for example `2026-12-01T18:57:34.120000Z`."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
