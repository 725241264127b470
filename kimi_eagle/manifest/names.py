"""The names of a matrix's variants: `draft--lr-1e-4--ttt_steps-3`. Pure.

A name is made of `a-z 0-9 _ -` alone, as the names of stages are: it is a folder's or a file's
name, an argument in a shell, a part of a `--set` path and of a URL as it stands. No key depends on
it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from kimi_eagle.identity import digest_document
from kimi_eagle.manifest.document import Json

LONGEST = 64
"""The longest name that a stage may have, in characters."""
BETWEEN = "--"
"""Parts a stage's name and the choices that make a variant of it."""

_PLAIN = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")
_WORDS = ("true", "false", "null")
_TEXT_LIMIT = 24
_DIGITS = 8


def variant_name(stage: str, choices: Sequence[tuple[str, Json]]) -> str:
    """The name of the variant of `stage` with these values: (label, value), in order.

    Where it would be too long, a digest of all the choices stands for those that do not fit.
    """
    parts = [f"{_label(label)}-{written(value)}" for label, value in choices]
    name = BETWEEN.join([stage, *parts])
    if len(name) <= LONGEST:
        return name
    digest = _digest([[label, value] for label, value in choices])
    room = LONGEST - len(BETWEEN) - len(digest)
    start = stage[:room]
    for part in parts:
        if len(start) + len(BETWEEN) + len(part) > room:
            break
        start += BETWEEN + part
    return f"{start}{BETWEEN}{digest}"


def written(value: Json) -> str:
    """A value in a name: `1e-4`, `25e-1` (2.5), `m1` (-1), `true`, `cosine`, `2_4_5` ([2, 4, 5]).

    What cannot be written so is told by a digest.
    """
    if value is None or isinstance(value, bool):
        return _WORDS[2] if value is None else _WORDS[not value]
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        joined = "_".join(written(item) for item in value)
        return joined if len(joined) <= _TEXT_LIMIT else _digest(value)
    return _digest(value)


def _number(value: int | float) -> str:
    """A number without a point: its digits as a whole number, and the power of ten to it."""
    sign = "m" if value < 0 else ""
    if isinstance(value, int) or value.is_integer():
        digits = str(abs(int(value)))
        if len(digits) <= _DIGITS:
            return sign + digits
    _, digits_of, exponent = Decimal(repr(abs(value))).normalize().as_tuple()
    return f"{sign}{''.join(map(str, digits_of))}e{exponent}"


def _text(value: str) -> str:
    if len(value) <= _TEXT_LIMIT and _PLAIN.fullmatch(value) and value not in _WORDS:
        return value
    last = value.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    start = re.sub("[^a-z0-9_]+", "_", last).strip("_")[:16]
    return f"{start or 'text'}-{_digest(value)}"


def _label(label: str) -> str:
    return re.sub("[^a-z0-9_]+", "-", label.lower()).strip("-") or "value"


def _digest(value: Json) -> str:
    return digest_document("variant/1", value)[:_DIGITS]
