"""What planning and the command line may load: nothing that a login node lacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cases import ROOT
from conftest import Project

HEAVY = [
    "torch",
    "transformers",
    "vllm",
    "speculators",
    "safetensors",
    "tokenizers",
    "numpy",
    "ray",
    "pyarrow",
]
SLOW = [
    *HEAVY,
    "rich",
    "sqlalchemy",
    "alembic",
    "pydantic",
    "starlette",
    "jinja2",
    "uvicorn",
    "anyio",
]

PACKAGE = ROOT / "kimi_eagle"
PURE = [
    "kimi_eagle.environments",
    "kimi_eagle.identity",
    "kimi_eagle.plan",
    "kimi_eagle.rows.conversations",
    "kimi_eagle.rows.intake",
    "kimi_eagle.rows.prompts",
    "kimi_eagle.rows.render",
    "kimi_eagle.rows.sources",
    "kimi_eagle.rows.split",
    "kimi_eagle.stages.catalog",
    "kimi_eagle.stages.evaluate.acceptance",
    "kimi_eagle.stages.vocab.choose",
    "kimi_eagle.states.contract",
    "kimi_eagle.states.index",
    "kimi_eagle.states.layout",
    "kimi_eagle.verifiers.facts",
    "kimi_eagle.verifiers.folder",
]


def _modules(pattern: str) -> list[str]:
    found = (path.relative_to(ROOT).with_suffix("") for path in sorted(PACKAGE.glob(pattern)))
    return [".".join(path.parts).removesuffix(".__init__") for path in found]


def _loaded(modules: list[str], forbidden: list[str]) -> dict[str, list[str]]:
    """For each module, imported in turn in one fresh interpreter, what of `forbidden` is there."""
    code = (
        "import importlib, json, sys\n"
        "modules, forbidden = json.loads(sys.argv[1])\n"
        "found = {}\n"
        "for name in modules:\n"
        "    importlib.import_module(name)\n"
        "    found[name] = [item for item in forbidden if item in sys.modules]\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([modules, forbidden])],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return dict(json.loads(done.stdout))


def test_the_command_line_loads_nothing_slow() -> None:
    assert _loaded(["kimi_eagle.cli"], SLOW) == {"kimi_eagle.cli": []}


def test_a_submit_that_finds_all_unchanged_loads_no_database_toolkit(
    made: Project,
) -> None:
    # They take as long to load as a thousand stages to look at.
    code = (
        "import sys\n"
        "from kimi_eagle.cli import main\n"
        "assert main(['--root', sys.argv[1], 'submit', sys.argv[2]]) == 0\n"
        "slow = {'sqlalchemy', 'alembic', 'rich', 'asyncio', 'numpy', 'torch'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    arguments = [sys.executable, "-c", code, str(made.root), str(made.manifest)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_planning_loads_nothing_heavy() -> None:
    modules = [*PURE, *_modules("stages/*/spec.py"), *_modules("manifest/*.py")]
    assert {name: found for name, found in _loaded(modules, HEAVY).items() if found} == {}


def test_the_check_sees_what_is_loaded() -> None:
    pytest.importorskip("numpy")
    assert _loaded(["kimi_eagle.rows.table"], HEAVY)["kimi_eagle.rows.table"] == [
        "safetensors",
        "numpy",
    ]


def test_every_stage_has_a_pure_contract() -> None:
    kinds = sorted(path.parent.name for path in PACKAGE.glob("stages/*/run.py"))
    assert kinds == sorted(path.parent.name for path in PACKAGE.glob("stages/*/spec.py"))
