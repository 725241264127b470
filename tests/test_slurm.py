"""Stages as jobs of a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import socket
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
)
from slurm_cluster import SlurmCluster
from test_batch import said

pytestmark = pytest.mark.slow


def test_a_manifest_comes_out_the_same_on_slurm(
    at_slurm: SlurmCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", WITH_STATES)
    all_there_are = ("--set", "stages.states.resources.workers=all")
    answer = project.submit("--executor", "slurm", *all_there_are)
    assert answer.code == 0, answer.err
    assert answer.outputs == first_extraction[1].outputs
    jobs = at_slurm.command("scontrol", "show", "job", "-o").splitlines()
    assert sum("JobState=COMPLETED" in job for job in jobs) == 6
    (run,) = project.cli("runs", "--json").json["runs"]
    assert {stage["resources"]["host"] for stage in run["stages"]} == {socket.gethostname()}
    shares = [job for job in jobs if ".part" in job]
    assert sorted(job.partition("BatchHost=")[2].split()[0] for job in shares) == ["n1", "n2"]
    assert not list((project.root / ".staging").iterdir())
    # no part of a key: here and there it is the same work
    assert set(project.submit().dispositions.values()) == {"reused"}


def test_a_node_that_dies_in_an_extraction_costs_nothing_but_time(
    at_slurm: SlurmCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    submit = project.start("submit", str(project.manifest), "--json", "--executor", "slurm")
    with extracting(project):
        node = at_slurm.command("squeue", "-h", "-o", "%N").strip()
        at_slurm.kill_node(node)
        at_slurm.command("scontrol", "update", f"nodename={node}", "state=down", "reason=dead")
    answer = said(submit)
    at_slurm.start_node(node)
    at_slurm.command("scontrol", "update", f"nodename={node}", "state=resume")
    assert answer.code == 0, answer.err
    assert "NODE_FAIL; beginning it again (1 of 2)" in answer.err
    assert answer.outputs["states"] == first_extraction[1].outputs["states"]
    states = next(stage for stage in answer.json["stages"] if stage["name"] == "states")
    assert states["metrics"]["rows_extracted"] < states["metrics"]["rows"], "some were kept"
    (run,) = project.cli("runs", "--json").json["runs"]
    assert [stage["name"] for stage in run["stages"]] == ["rows", "states"]
    assert project.cli("verify", "--all").code == 0


def test_what_a_coordinator_that_was_killed_gave_out_is_followed_by_the_next(
    at_slurm: SlurmCluster, first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    submit = project.start("submit", str(project.manifest), "--json", "--executor", "slurm")
    with extracting(project):
        job = at_slurm.command("squeue", "-h", "-o", "%i").strip()
        count = len(at_slurm.command("scontrol", "show", "job", "-o").strip().splitlines())
        kill(submit.pid)
        submit.communicate()
        (run,) = project.cli("runs", "--json").json["runs"]
        assert run["status"] == "lost"
        # another submit leaves alone what goes on
        other = project.submit("--set", "stages={head: {kind: head}}")
        assert other.dispositions == {"head": "executed"}
        assert f"`kimi-eagle attach {run['id']}` takes it over" in other.err
        assert at_slurm.command("squeue", "-h", "-o", "%i").strip() == job
    answer = project.submit("--executor", "slurm")
    assert answer.code == 0, answer.err
    assert f"states: going on with work of run {run['id']}" in answer.err
    assert answer.dispositions == {"rows": "reused", "states": "executed"}
    assert answer.outputs["states"] == first_extraction[1].outputs["states"]
    last = at_slurm.command("scontrol", "show", "job", "-o").strip().splitlines()[-1]
    assert last.startswith(f"JobId={job} "), "no other job was needed"
    # of what it gave out nothing is left to wait for
    assert project.submit("--executor", "slurm").dispositions["states"] == "reused"
    runs = project.cli("runs", "--json").json["runs"]
    assert {item["id"]: item["status"] for item in runs}[run["id"]] == "interrupted"
    assert len(at_slurm.command("scontrol", "show", "job", "-o").strip().splitlines()) == count


def test_cancel_ends_the_jobs_of_a_run_that_lost_its_coordinator(
    at_slurm: SlurmCluster, tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    submit = project.start("submit", str(project.manifest), "--json", "--executor", "slurm")
    with extracting(project):
        kill(submit.pid)
        submit.communicate()
    assert project.cli("cancel", "latest").code == 0
    assert at_slurm.command("squeue", "-h") == ""
    # what it had extracted until then is kept
    states = next(stage for stage in project.submit().json["stages"] if stage["name"] == "states")
    assert states["metrics"]["rows_extracted"] < states["metrics"]["rows"]
    assert not list((project.root / ".staging").iterdir())


def test_what_slurm_does_not_have_is_refused_before_anything_starts(
    at_slurm: SlurmCluster, tmp_path: Path
) -> None:
    project = new_project(tmp_path / "project", ROWS_AND_STATES)
    answer = project.submit(
        "--executor", "slurm", "--set", "stages.states.resources={gpus: 8, cpus: 4}"
    )
    assert answer.code == 2
    assert "needs 8 GPUs, 4 CPUs; 0 of 2 nodes have that" in answer.err
    answer = project.submit("--executor", "slurm", "--set", "stages.states.resources={time: 2h}")
    assert "needs 7200 s; the longest that is allowed is 3600 s" in answer.err
    assert project.cli("runs", "--json").json["runs"] == []


def test_a_training_one_of_whose_nodes_dies_comes_out_as_that_of_two_processes_on_one(
    at_slurm: SlurmCluster, two_processes: Answer, extracted: Project
) -> None:
    extracted.write(TWO_PROCESSES)
    manifest = str(extracted.manifest)
    submit = extracted.start(
        "submit", manifest, "--json", "--executor", "slurm", "--set", ON_TWO_NODES
    )
    with training(extracted) as processes:
        assert at_slurm.command("squeue", "-h", "-o", "%D %N").strip() == "2 n[1-2]"
        kill(processes[1][0])
        wait_for_their_end(extracted, processes)
    answer = said(submit)
    require_gone_on(extracted, answer, two_processes)
    assert "nothing was heard of node 1; beginning it again (1 of 2)" in answer.err
