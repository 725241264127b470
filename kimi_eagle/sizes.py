"""Sizes and times as people write them. Pure."""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Bytes: `500GB`, `1.5TiB`, a plain number. Raises: ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text, re.ASCII)
    unit = found[2].upper() if found else None
    if found is None or unit not in _UNITS:
        raise ValueError(
            f"{text!r} is no size: give bytes, or a number and a unit, for example 500GB or 2TiB"
        )
    return int(float(found[1]) * _UNITS[unit])


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> int:
    """Seconds: `90m`, `12h`, `2d`, `1:30:00`. Raises: ValueError."""
    found = re.fullmatch(r"(\d+)([smhd])", text, re.ASCII)
    if found:
        return int(found[1]) * _SECONDS[found[2]]
    clock = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text, re.ASCII)
    if clock is None:
        raise ValueError(
            f"{text!r} is no time: give a number and s, m, h or d, or hours:minutes:seconds; for "
            "example 90m or 12:00:00"
        )
    hours, minutes, seconds = map(int, clock.groups())
    return hours * 3600 + minutes * 60 + seconds
