"""Look at everything."""

from __future__ import annotations

from pathlib import Path

from kimi_eagle.doctor import machine, packages, place
from kimi_eagle.doctor.checks import Diagnosis


def diagnose(root: Path) -> Diagnosis:
    """Check the installation, the machine and the root; nothing is left behind."""
    checks = [packages.python(), *packages.packages()]
    have = packages.installed()
    said = None
    if "torch" in have:
        loaded, said = machine.torch()
        checks.append(loaded)
    extra = packages.engine(have)
    seen = said["gpus"] if said is not None else ()
    checks += [
        machine.gpus(said, extra),
        machine.processor(),
        machine.memory(),
        machine.shared_memory(len(seen)),
        *place.place(root),
    ]
    return Diagnosis(checks)
