"""What changed between two recorded environments (see `provenance`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Packages and settings are compared one by one, these as a whole. Where the interpreter lies is
# not compared: it changes no bytes.
_PLAIN = ("kimi_eagle", "python", "system", "machine", "processor", "cores", "driver", "gpus")
_PARTS = ("packages", "flags", "code")


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was."""

    name: str
    then: Any
    now: Any

    def text(self) -> str:
        return f"{self.name} {_shown(self.then)} → {_shown(self.now)}"


def leaves(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment as one flat mapping: `python`, `packages.torch`, `code.commit`."""
    found = {name: environment[name] for name in _PLAIN if name in environment}
    for part in _PARTS:
        for name, value in (environment.get(part) or {}).items():
            found[f"{part}.{name}"] = value
    # Whether anything was uncommitted is said by the digest of it.
    found.pop("code.dirty", None)
    return found


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs; what the older record does not speak of is not compared."""
    before, after = leaves(then), leaves(now)
    unknown = {name for name in _PLAIN if name not in then}
    unknown |= {name for name in after if name.split(".")[0] in _PARTS and _silent(then, name)}
    return [
        Change(name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if name not in unknown and before.get(name) != after.get(name)
    ]


def _silent(then: Mapping[str, Any], name: str) -> bool:
    return name.split(".")[0] not in then


def dirty(environment: Mapping[str, Any]) -> str | None:
    """The digest of what was not committed; None when it all was, or nothing is known of it."""
    code = environment.get("code") or {}
    return str(code["diff"]) if code.get("dirty") else None


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = str(value)
    # Commits and digests are told apart by less.
    return text[:12] if len(text) in (40, 64) and text.isalnum() else text
