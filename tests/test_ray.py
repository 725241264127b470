"""Stages in a real Ray cluster of two nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clusters import (
    ON_TWO_NODES,
    ROWS_AND_STATES,
    extracting,
    require_gone_on,
    training,
    wait_for_their_end,
)
from conftest import (
    TWO_PROCESSES,
    WITH_STATES,
    Answer,
    Project,
    kill,
    new_project,
    wait_for,
    workers,
)
from ray_cluster import RayCluster, at
from test_batch import said

pytestmark = pytest.mark.slow


def test_a_manifest_comes_out_the_same_on_ray(
    ray: RayCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", WITH_STATES)
    answer = project.submit(*at(ray))
    assert answer.code == 0, answer.err
    assert answer.outputs == first_extraction[1].outputs
    assert not list((project.root / ".staging").iterdir())
    wait_for(lambda: not workers(project.root), "the end of all that was started")


def test_a_coordinator_and_then_a_node_die_in_an_extraction(
    ray: RayCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    # Of the two nodes one has GPUs, so that it is known which one is to die.
    resources = ["--set", "stages.states.resources={gpus: 1}"]
    submit = project.start("submit", str(project.manifest), "--json", *at(ray), *resources)
    with extracting(project):
        kill(submit.pid)
        submit.communicate()
        (run,) = project.cli("runs", "--json").json["runs"]
        assert run["status"] == "lost"
        attach = project.start("attach", run["id"], "--json")
        ray.ask("kill n2")
        wait_for(lambda: not workers(project.root), "the end of all that ran on the node", 90)
        ray.ask("add n3")
    answer = said(attach)
    assert answer.code == 0, answer.err
    assert answer.outputs["states"] == first_extraction[1].outputs["states"]
    log = (project.root / run["id"] / "submit.log").read_text()
    assert "beginning it again (1 of 2)" in log
    (run,) = project.cli("runs", "--json").json["runs"]
    assert [stage["disposition"] for stage in run["stages"]] == ["executed", "executed"]
    assert project.cli("verify", "--all").code == 0


def test_a_training_one_of_whose_nodes_dies_comes_out_as_that_of_two_processes_on_one(
    ray: RayCluster, two_processes: Answer, extracted: Project
) -> None:
    extracted.write(TWO_PROCESSES)
    submit = extracted.start(
        "submit", str(extracted.manifest), "--json", *at(ray), "--set", ON_TWO_NODES
    )
    with training(extracted) as processes:
        guard = processes[1][0]
        kill(int(Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1]))
        wait_for_their_end(extracted, processes)
    answer = said(submit)
    require_gone_on(extracted, answer, two_processes)
    assert "gone from the Ray cluster; beginning it again (1 of 2)" in answer.err


# Ray's own patience with a head that is gone, a minute, in seconds.
IMPATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}


def test_a_head_that_dies_ends_a_run_in_words_and_another_cluster_completes_it(
    ray: RayCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    doomed = RayCluster(**IMPATIENT)
    try:
        submit = project.start(
            *("submit", str(project.manifest), "--json", *at(doomed)),
            env={
                **os.environ,
                **IMPATIENT,
                "KIMI_EAGLE_SILENCE_SECONDS": "6",
                "KIMI_EAGLE_AWAY_SECONDS": "1",
            },
        )
        with extracting(project):
            doomed.ask("kill head")
            answer = said(submit)
        wait_for(lambda: not workers(project.root), "the end of all that was started")
    finally:
        doomed.stop()
    assert answer.code == 1
    away = f"the Ray cluster at {doomed.address} does not answer"
    assert f"{away}, and the task has given no sign of life for" in answer.err
    assert "Traceback" not in answer.err
    assert answer.dispositions == {"rows": "executed", "states": "failed"}
    (run,) = project.cli("runs", "--json").json["runs"]
    assert run["status"] == "failed"
    answer = project.submit(*at(ray))
    assert answer.code == 0, answer.err
    assert answer.dispositions == {"rows": "reused", "states": "executed"}
    assert answer.outputs["states"] == first_extraction[1].outputs["states"]
    states = next(stage for stage in answer.json["stages"] if stage["name"] == "states")
    assert states["metrics"]["rows_extracted"] < states["metrics"]["rows"], "some were kept"


def test_what_the_cluster_does_not_have_is_refused_before_anything_starts(
    ray: RayCluster, tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    answer = project.submit(*at(ray), "--set", "stages.states.resources={gpus: 8}")
    assert answer.code == 2
    assert "needs 8 GPUs, 0 CPUs; 0 of 2 nodes have that" in answer.err
    assert project.cli("runs", "--json").json["runs"] == []
