"""Exact UTC times, as text."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGO = re.compile(r"(\d+)([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def now() -> str:
    """Now, to the microsecond, for example `2026-12-01T18:57:34.120000Z`."""
    return _written(datetime.now(UTC))


def since(text: str, now: datetime | None = None) -> str:
    """A date, a time or an age as a time in UTC, written as the registry does.

    Raises: ValueError.
    """
    ago = _AGO.fullmatch(text)
    try:
        if ago:
            moment = (now or datetime.now(UTC)) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            moment = datetime.fromisoformat(text)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
        found = moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time: give a date (2026-12-01), a time (2026-12-01T12:30), "
            "or an age (30m, 3h, 2d, 1w)"
        ) from None
    return _written(found)


def _written(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
