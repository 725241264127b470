"""A training that is killed, and submitted again, on the real runner: slow, run by `make test`."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project, kill, new_project, wait_for, worker_of
from keeping import killed_evicting

pytestmark = pytest.mark.slow

SEED = 20261201
KILLS = 4

EXTRACTED = """\
version: 1
name: resumed
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 256, val_ratio: 0.2}
  states: {kind: extract, rows: rows, layers: [2, 4, 5], engine: {kind: transformers}}
  vocab: {kind: vocab, rows: rows, size: 256}
"""
DRAFT = """\
  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: %(epochs)d, lr: 1e-3,
          batch_tokens: 128, noise: {std: 0.05}, scheduler: %(scheduler)s, save_steps: 2,
          save_minutes: null, keep: {best: 1, last: 2, every: 3}%(more)s}
"""


def manifest(epochs: int = 6, scheduler: str = "linear", more: str = "") -> str:
    return EXTRACTED + DRAFT % {"epochs": epochs, "scheduler": scheduler, "more": more}


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = new_project(tmp_path_factory.mktemp("extracted") / "project", EXTRACTED)
    answer = project.submit()
    assert answer.code == 0, answer.err
    return project


@pytest.fixture(scope="module")
def unbroken(extracted: Project, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    project = extracted.copy(tmp_path_factory.mktemp("unbroken") / "project")
    project.write(manifest())
    answer = project.submit()
    assert answer.code == 0, answer.err
    return answer


def metrics_of(answer: Answer) -> dict[str, Any]:
    (found,) = (stage for stage in answer.json["stages"] if stage["name"] == "draft")
    return dict(found["metrics"])


def steps_seen(project: Project) -> list[tuple[int, dict[str, Any]]]:
    """(step, figures) of each step that any run under a root has logged."""
    found = []
    paths = [*project.root.glob("*/stages/draft.events"), *project.root.glob(".staging/*/events*")]
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "metric" and event["split"] == "train":
                found.append((event["step"], event["values"]))
    return found


def farthest(project: Project) -> int:
    return max((step for step, _ in steps_seen(project)), default=0)


def killed_at(project: Project, step: int, how: str) -> None:
    """Submit, and kill the worker or the coordinator when the training has come to a step."""
    process = project.start_submit()
    wait_for(lambda: farthest(project) >= step or process.poll() is not None, f"step {step}")
    assert process.poll() is None, process.communicate()[1]
    if how == "worker":
        kill(worker_of(project.root), signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if how == "coordinator" else signal.SIGTERM)
    process.communicate(timeout=60)


def test_killed_at_random_moments_it_ends_in_the_same_bytes(
    extracted: Project, unbroken: Answer, tmp_path: Path
) -> None:  # TRN-09, TRN-10, TRN-11, RUN-05
    project = extracted.copy(tmp_path / "project")
    project.write(manifest())
    total = metrics_of(unbroken)["steps"]
    assert total >= 20
    draw = random.Random(SEED)
    part = total // (KILLS + 1)
    for number in range(KILLS):
        how = ("worker", "coordinator", "asked", "worker")[number % 4]
        killed_at(project, number * part + draw.randint(2, part), how)
    answer = project.submit()
    assert answer.code == 0, answer.err
    assert answer.outputs["draft"] == unbroken.outputs["draft"]
    metrics = metrics_of(answer)
    assert metrics["steps"] == total
    assert metrics["steps_run"] == total - metrics["resumed_from_step"] < total
    for name in ("val_loss", "full_acc_0", "epoch", "tokens"):
        assert metrics[name] == metrics_of(unbroken)[name]
    figures: dict[int, dict[str, Any]] = {}
    for step, values in steps_seen(project):
        assert figures.setdefault(step, values) == values, "a step that was taken twice is the same"
    assert sorted(figures) == list(range(1, total + 1))
    assert not list((project.root / ".staging").glob("*"))
    keeps_what_it_should(project, total)


def test_killed_while_it_lets_a_snapshot_go_the_next_run_lets_it_go(
    extracted: Project, tmp_path: Path
) -> None:
    project = extracted.copy(tmp_path / "project")
    project.write(manifest())
    killed_evicting(project, "submit", str(project.manifest))
    answer = project.submit()
    assert answer.code == 0, answer.err
    keeps_what_it_should(project, metrics_of(answer)["steps"])


def keeps_what_it_should(project: Project, total: int) -> None:
    """Of a training that ended: the best epoch, and every third; nothing else is to go on from."""
    with closing(sqlite3.connect(project.root / "registry.sqlite")) as registry:
        rows = registry.execute(
            "select distinct o.role, a.digest, a.state from execution_outputs o "
            "join artifacts a on a.digest = o.digest where o.role like 'snapshot@%'"
        ).fetchall()
        resumed = registry.execute(
            "select count(*) from execution_inputs where role = 'resume'"
        ).fetchone()[0]
    assert 1 <= resumed <= KILLS
    present = {digest for _, digest, state in rows if state == "present"}
    on_disk = {
        path.stem
        for path in (project.root / "objects").glob("*/*.json")
        if json.loads(path.read_text("utf-8"))["kind"] == "snapshot"
        and path.with_suffix("").is_dir()
    }
    assert present == on_disk
    assert 2 <= len(present) <= 3
    assert len(rows) > len(present), "what was let go is remembered"
    answer = project.cli("verify", "--all", "--json")
    assert answer.code == 0, answer.out + answer.err
    before = lineage(project)
    assert any(kind == "snapshot" for kind, _ in before)
    rebuilt = project.cli("registry", "rebuild")
    assert rebuilt.code == 0, rebuilt.err
    assert lineage(project) == before


def lineage(project: Project) -> set[tuple[str, str]]:
    """The checkpoint's ancestors: what was gone on from is among them."""
    (digest,) = project.submit().outputs["draft"].values()
    answer = project.cli("lineage", digest, "--up", "--json")
    return {(node["kind"], node["digest"]) for node in answer.json["nodes"]}


def test_more_epochs_go_on_and_fine_tuning_starts_anew(extracted: Project, tmp_path: Path) -> None:
    project = extracted.copy(tmp_path / "project")
    project.write(manifest(epochs=1, scheduler="constant"))
    short = project.submit()
    assert short.code == 0, short.err
    project.write(manifest(epochs=2, scheduler="constant"))
    more = project.submit()
    assert more.code == 0, more.err
    assert metrics_of(more)["resumed_from_step"] == metrics_of(short)["steps"]
    # Another training starts from a checkpoint's weights, and keeps its vocabulary.
    (digest,) = more.outputs["draft"].values()
    tuned = manifest(epochs=1, more=f", init_from: {digest[:16]}").replace(" vocab: vocab,", "")
    project.write(tuned)
    answer = project.submit()
    assert answer.code == 0, answer.err
    found = project.cli("lineage", *answer.outputs["draft"].values(), "--up", "--json").json
    assert digest in {node["digest"] for node in found["nodes"]}
    project.write(tuned.replace(digest[:16], "'0000'"))
    refused = project.submit()
    assert refused.code == 2
    assert "no checkpoint in this registry has this hash" in refused.err


def test_two_processes_take_the_steps_of_one(extracted: Project, tmp_path: Path) -> None:
    """gloo on a CPU, in fp32: the same losses within 1e-4, for the sums are in another order."""
    curves = []
    for devices in (1, 2):
        project = extracted.copy(tmp_path / f"project{devices}")
        more = f", accumulate: 2, precision: fp32, devices: {devices}"
        project.write(manifest(epochs=2, more=more))
        answer = project.submit()
        assert answer.code == 0, answer.err
        assert metrics_of(answer)["devices"] == devices
        curves.append((dict(steps_seen(project)), metrics_of(answer)))
    (one, whole), (two, shared) = curves
    assert sorted(one) == sorted(two) == list(range(1, whole["steps"] + 1))
    for step, values in one.items():
        for name, value in values.items():
            assert two[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
    assert shared["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)


def test_another_number_of_processes_goes_on(extracted: Project, tmp_path: Path) -> None:
    """Each process holds its share of the optimizer's state; what is saved is whole."""

    def trained(project: Project, devices: int, epochs: int) -> dict[str, Any]:
        more = f", accumulate: 2, precision: fp32, optimizer: muon, devices: {devices}"
        project.write(manifest(epochs=epochs, scheduler="constant", more=more))
        answer = project.submit()
        assert answer.code == 0, answer.err
        return metrics_of(answer)

    whole = trained(extracted.copy(tmp_path / "whole"), 1, 3)
    project = extracted.copy(tmp_path / "changed")
    before = trained(project, 2, 1)
    for devices, epochs in ((1, 2), (2, 3)):
        found = trained(project, devices, epochs)
        assert found["resumed_from_step"] == before["steps"]
        assert found["devices"] == devices
        before = found
    assert found["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)
