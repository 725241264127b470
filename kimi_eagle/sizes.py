"""Sizes as people write them. Pure."""

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
