"""Rows whose states are refused: counted against a limit, told of, listed; never just left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kimi_eagle.identity import short
from kimi_eagle.job import StageFailed
from kimi_eagle.states.checks import BadStates

# Told of one by one; all are counted, and listed with the states.
_TOLD = 20


class Refusals:
    """The refused rows of one stage."""

    def __init__(self, limit: int | float, rows: int, tell: Callable[[str], None]):
        """Args:
        limit: how many rows may be refused; a float below 1 is a share of `rows`.
        rows: how many rows the stage takes in hand.
        tell: is given a sentence about each of the first refused rows.
        """
        self.limit = limit if isinstance(limit, int) else int(limit * rows)
        self._given = limit
        self._all = rows
        self._tell = tell
        self.rows: dict[str, str] = {}
        """Row key → reason, as `states.layout` lists it."""

    def add(self, key: str, error: BadStates) -> None:
        """Count one row.

        Raises:
            StageFailed: that is one more than the limit.
        """
        self.rows[key] = error.reason
        if len(self.rows) > self.limit:
            counted = f"; refused: {self._summary()}" if self.limit else ""
            raise StageFailed(
                f"row {short(key)}: {error} (max_bad_rows {self._given} of {self._all} rows"
                f"{counted})"
            )
        if len(self.rows) <= _TOLD:
            self._tell(
                f"row {short(key)} has no states: {error} ({len(self.rows)} of at most "
                f"{self.limit})"
            )

    def require(self, stored: int) -> None:
        """Raises: StageFailed when `stored`, the rows that have states, is none."""
        if not stored:
            raise StageFailed(
                f"no row is left: all {len(self.rows)} were refused ({self._summary()})"
            )

    def document(self) -> dict[str, Any]:
        """For metrics: how many rows were refused, and for which reasons."""
        return {"rows_refused": len(self.rows), "refused": self._counts()}

    def _counts(self) -> dict[str, int]:
        return dict(sorted(Counter(self.rows.values()).items()))

    def _summary(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self._counts().items())
