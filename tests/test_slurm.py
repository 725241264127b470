"""Stages as jobs of a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import WITH_STATES, Answer, Project, kill, new_project, wait_for, workers
from slurm_cluster import NODES, SlurmCluster, unpacked
from test_batch import said

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    base = tmp_path_factory.mktemp("slurm")
    unpacked(base)
    cluster = SlurmCluster(base)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def at_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    return slurm


def test_a_manifest_comes_out_the_same_on_slurm(
    at_slurm: SlurmCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", WITH_STATES)
    answer = project.submit("--executor", "slurm")
    assert answer.code == 0, answer.err
    assert answer.outputs == first_extraction[1].outputs
    jobs = at_slurm.command("scontrol", "show", "job", "-o")
    assert jobs.count("JobState=COMPLETED") == 4
    assert not list((project.root / ".staging").iterdir())
    # no part of a key: here and there it is the same work
    assert set(project.submit().dispositions.values()) == {"reused"}
