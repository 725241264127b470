"""What `doctor` checks, in order, and how each came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, BROKEN, ABSENT = "ok", "warn", "broken", "absent"
"""`absent`: not here, and nothing that is here needs it."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: str
    found: str
    remedy: str = ""
    """What to do; empty where it is as it should be."""


@dataclass(frozen=True)
class Diagnosis:
    checks: Sequence[Check]

    @property
    def usable(self) -> bool:
        return not any(check.state == BROKEN for check in self.checks)

    def document(self) -> dict[str, Any]:
        """As `doctor --json` prints it."""
        return {
            "status": "usable" if self.usable else "broken",
            "checks": [asdict(check) for check in self.checks],
        }
