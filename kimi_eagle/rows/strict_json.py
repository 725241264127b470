"""Strict JSON, read alike everywhere: a repeated key, NaN, Infinity and numbers that overflow make
a record bad. Standard library only."""

from __future__ import annotations

import json
import math
from typing import Any


class BadRecord(ValueError):
    """A record, or a file of them, that cannot be read."""


def loads(data: bytes) -> Any:
    """Strict JSON.

    Raises:
        BadRecord: not UTF-8, not JSON, a repeated key, a constant that is no JSON, or a number
            that overflows.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_constant=_constant,
            parse_float=_float,
        )
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise BadRecord("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg} at character {error.pos}") from None
    except BadRecord:
        raise
    except ValueError as error:  # a whole number of more digits than Python reads
        raise BadRecord(f"not JSON that is read here: {error}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRecord(f"key {key!r} is repeated")
            seen.add(key)
    return value


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadRecord(f"{text} is too large a number")
    return number


def _constant(name: str) -> Any:
    raise BadRecord(f"{name} is not JSON")
