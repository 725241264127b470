"""What stages need of where they run: refused, given out, waited for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from clusters import ON_TWO_NODES
from conftest import (
    HEAD,
    TWO_PROCESSES,
    WITH_STATES,
    Answer,
    Project,
    halted_worker_of,
    kill,
    new_project,
    worker_of,
)
from test_batch import said

from kimi_eagle.executors import shared
from kimi_eagle.executors.guard import EXIT, of_node
from kimi_eagle.executors.local import LocalExecutor
from kimi_eagle.executors.protocol import Needs, Node, Offer, Task, TaskLost
from kimi_eagle.sizes import parse_seconds

# Ids that no machine has: GPUs are given out by id, be they there or not.
IDS = (os.getpid() + 1000, os.getpid() + 1001)
SIDE_BY_SIDE = ("--set", "stages.head.resources.cpus=1", "--set", "stages.rows.resources.cpus=1")


def needing(gpus: int) -> list[str]:
    mine = f"executor={{kind: local, gpus: [{IDS[0]}, {IDS[1]}]}}"
    return ["--set", mine, "--set", f"stages.head.resources.gpus={gpus}"]


def gpus_of(worker: int) -> str:
    lines = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    return next(line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES="))


def test_a_stage_has_its_gpus_to_itself_and_who_needs_them_waits(tmp_path: Path) -> None:
    first, second, third = (new_project(tmp_path / name, HEAD) for name in ("a", "b", "c"))
    one = first.start("submit", str(first.manifest), "--json", *needing(1))
    halted = halted_worker_of(first.root)
    assert gpus_of(halted) == f"CUDA_VISIBLE_DEVICES={IDS[0]}"
    # one of two is free: both are not
    other = second.start("submit", str(second.manifest), "--json", *needing(2))
    assert other.stderr is not None
    lines = [other.stderr.readline() for _ in range(3)]
    assert lines[2] == "head: waiting for 2 free GPUs of this machine\n"
    beside = third.start("submit", str(third.manifest), "--json", *needing(1))
    assert gpus_of(worker_of(third.root)) == f"CUDA_VISIBLE_DEVICES={IDS[1]}"
    assert said(beside).code == 0
    kill(halted, signal.SIGCONT)
    assert said(one).code == 0
    assert said(other).code == 0


def test_gpus_are_free_again_when_their_coordinator_is_killed(head_project: Project) -> None:
    submit = head_project.start("submit", str(head_project.manifest), *needing(2))
    halted_worker_of(head_project.root)
    kill(submit.pid)
    submit.communicate()
    assert head_project.submit(*needing(2)).code == 0


def test_what_this_machine_does_not_have_is_refused_before_anything_starts(
    head_project: Project,
) -> None:
    answer = head_project.submit(*needing(3))
    assert answer.code == 2
    assert "needs 3 GPUs, 0 CPUs; 0 of 1 nodes have that" in answer.err
    answer = head_project.submit("--set", "stages.head.resources={memory: 900TiB, cpus: 9999}")
    assert answer.code == 2
    assert "needs 0 GPUs, 9999 CPUs, 921600.0 GiB" in answer.err
    assert head_project.cli("runs", "--json").json["runs"] == []
    # what is there already needs nothing
    assert head_project.submit().code == 0
    assert head_project.submit(*needing(3)).dispositions == {"head": "reused"}


@pytest.mark.parametrize("value", ["12x", "1:99:00", "", "-3h"])
def test_a_time_that_is_none_is_a_mistake_in_the_manifest(
    head_project: Project, value: str
) -> None:
    answer = head_project.cli(
        "validate", str(head_project.manifest), "--set", f"stages.head.resources.time='{value}'"
    )
    assert answer.code == 2
    assert "stages.head.resources.time" in answer.err


def test_times_are_read_as_people_write_them() -> None:
    read = [parse_seconds(text) for text in ("90s", "90m", "2d", "1:30:05")]
    assert read == [90, 5400, 172800, 5405]


def test_stages_that_say_what_they_need_run_side_by_side(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    answer = project.submit(*SIDE_BY_SIDE)
    assert answer.code == 0, answer.err
    lines = answer.err.splitlines()
    words = [" ".join(line.split()[:2]) for line in lines]
    ended = words.index("head: done"), words.index("rows: done")
    assert max(words.index("head: running"), words.index("rows: running")) < min(ended)
    # it says nothing of what it needs, and so has the machine to itself
    assert words.index("vocab: running") > max(ended)


def test_a_stage_that_fails_lets_those_beside_it_come_to_their_end(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    project.chats.write_text("{}\n", "utf-8")
    answer = project.submit(*SIDE_BY_SIDE)
    assert answer.code == 1
    assert answer.dispositions == {"head": "executed", "rows": "failed"}


def test_room_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    local = LocalExecutor(("0", "1"))
    assert local.room(Needs(), [])
    assert not local.room(Needs(), [Needs(cpus=1)])
    assert local.room(Needs(cpus=1, gpus=1), [Needs(cpus=1, gpus=1)])
    assert not local.room(Needs(cpus=1, gpus=1), [Needs(cpus=1, gpus=2)])
    assert not local.room(Needs(cpus=2), [Needs(cpus=1)])
    assert not local.room(Needs(cpus=1, memory_bytes=2**60), [Needs(cpus=1)])


def test_an_offer_says_what_it_lacks() -> None:
    offer = Offer((Node("a", 8, 0, 2**30), Node("b", 8, 4, 2**30)), seconds=60)
    assert offer.lacks(Needs(gpus=4)) is None
    assert offer.lacks(Needs(nodes=2)) is None
    assert str(offer.lacks(Needs(gpus=4, nodes=2))).startswith("needs 2 nodes of 4 GPUs, 0 CPUs; 1")
    assert "the longest that is allowed is 60 s" in str(offer.lacks(Needs(seconds=61)))
    assert Offer(()).lacks(Needs()) == "there is no node"


@pytest.mark.slow
def test_rows_that_are_shared_out_come_out_as_if_they_were_not(
    first_extraction: tuple[Project, Answer], made: Project
) -> None:
    made.write(WITH_STATES)
    answer = made.submit("--set", "stages.states.resources.workers=2")
    assert answer.code == 0, answer.err
    whole = first_extraction[1]
    assert answer.outputs["states"] == whole.outputs["states"]
    then, now = (
        next(stage["metrics"] for stage in item.json["stages"] if stage["name"] == "states")
        for item in (whole, answer)
    )
    assert now.pop("workers") == 2
    assert now.pop("probed") >= then.pop("probed")
    for measured in ("agreement", "next_best"):
        del now[measured], then[measured]
    assert now == then
    assert made.cli("verify", "--all").code == 0
    (run, _) = made.cli("runs", "--json").json["runs"]
    assert [stage["name"] for stage in run["stages"]] == ["head", "rows", "vocab", "states"]


def test_only_kinds_with_rows_share_them_out(head_project: Project) -> None:
    answer = head_project.submit("--set", "stages.head.resources.workers=2")
    assert answer.code == 2
    assert "only stages of kind extract and regenerate have rows to share out" in answer.err


def test_several_nodes_are_refused_where_there_are_none(project: Project) -> None:
    project.write(TWO_PROCESSES)
    answer = project.submit("--set", ON_TWO_NODES)
    assert answer.code == 2
    assert "it asks for 2 nodes, and the local executor has this machine alone" in answer.err
    answer = project.submit("--set", "stages.states.resources={nodes: 2}")
    assert answer.code == 2
    assert "only stages of kind train run on several nodes: leave `nodes` out" in answer.err
    assert project.cli("runs", "--json").json["runs"] == []
    three = ("--set", "stages.draft.resources.nodes=3")
    answer = project.cli("validate", str(project.manifest), *three)
    assert answer.code == 2
    assert "3 devices on 3 nodes share the batches of an optimizer step" in answer.err


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({0: {"code": 0}}, None),
        ({0: {"code": 0}, 1: {"code": 0}}, 0),
        ({0: {"code": 137, "because": 1}, 1: {"code": 28}}, 28),
        ({1: {"code": 1}}, None),
    ],
)
def test_several_nodes_end_with_the_code_of_the_one_that_failed(
    tmp_path: Path, said: dict[int, dict[str, int]], code: int | None
) -> None:
    task = Task("t", (), tmp_path, tmp_path / "log", tmp_path / "usage.json", needs=Needs(nodes=2))
    for node, value in said.items():
        (tmp_path / of_node(EXIT, node)).write_text(json.dumps(value))
    assert shared.exit_code(task) == code
    assert shared.over(task) is (code is not None)


def test_a_node_whose_worker_was_killed_makes_lost_work_of_all(tmp_path: Path) -> None:
    task = Task("t", (), tmp_path, tmp_path / "log", tmp_path / "usage.json", needs=Needs(nodes=3))
    (tmp_path / of_node(EXIT, 0)).write_text('{"code": 1}')
    (tmp_path / of_node(EXIT, 1)).write_text('{"code": 137}')
    with pytest.raises(TaskLost, match="node 1 was ended by signal 9, nothing was heard of node 2"):
        shared.exit_code(task)
