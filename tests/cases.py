"""Where the public bug cases and the real material lie, when they are beside the project.

They are not part of it: a test that needs them is skipped, with the reason, where they are absent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_CASES = ROOT.parent / "shared" / "cases" / "inputs"
_MATERIAL = ROOT.parent / "shared" / "material"
DEMO_VERIFIER = ROOT / "kimi_eagle" / "demo" / "verifier"


def case_input(name: str) -> Path:
    """A file or folder of the public cases' inputs."""
    return _present(_CASES / name, "public cases")


def case_json(name: str) -> Any:
    return json.loads(case_input(name).read_text("utf-8"))


def material(name: str) -> Path:
    """A file or folder of the real material."""
    return _present(_MATERIAL / name, "real material")


def demo_verifier() -> Path:
    return _present(DEMO_VERIFIER, "demo verifier")


def _present(path: Path, what: str) -> Path:
    if not path.exists():
        pytest.skip(f"{what} not here: {path.relative_to(ROOT.parent)}")
    return path
