"""Making artifacts again: what is compared, what is refused, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import ROOT
from conftest import HEAD, Answer, Project, new_project, worker_of

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.comparison import first_parting, text, within
from kimi_eagle.environments import changes
from kimi_eagle.identity import digest_document
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.schema import FILE
from kimi_eagle.run_record import LossRecord
from kimi_eagle.verifiers.folder import safetensors_header

TRAINING = """\
version: 1
name: small
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 256, val_ratio: 0.2}
  states: {kind: extract, rows: rows, layers: [2, 4, 5], engine: {kind: transformers}}
  vocab: {kind: vocab, rows: rows, size: 512}
  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 2, lr: 1e-3,
          batch_tokens: 256}
"""


def reproduce(project: Project, digest: str, *arguments: str, root: Path | None = None) -> Answer:
    """With the project's own folder for sources: a copy's runs name the folder it is a copy of."""
    sources = () if "--sources" in arguments else ("--sources", str(project.folder))
    return project.cli("reproduce", digest, "--json", *sources, *arguments, root=root)


def statuses(answer: Answer) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in answer.json["stages"]}


def differences(answer: Answer, stage: str) -> list[dict[str, Any]]:
    (found,) = (item for item in answer.json["stages"] if item["name"] == stage)
    return list(found["differences"])


def runs_of(project: Project, root: Path | None = None) -> list[tuple[str, str]]:
    with sqlite3.connect((root or project.root) / FILE) as connection:
        return list(connection.execute("select kind, status from runs order by seq"))


def record_of(project: Project, digest: str, file: Path) -> Path:
    answer = project.cli("record", digest)
    assert answer.code == 0, answer.err
    file.write_text(answer.out, "utf-8")
    return file


def altered(file: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A record with something else in it, its keys made right again."""
    record = json.loads(file.read_text("utf-8"))
    change(record)
    for stage in record["stages"]:
        stage["key"] = digest_document("stage/1", stage["document"])
    other = file.with_name(f"altered-{file.name}")
    other.write_text(json.dumps(record), "utf-8")
    return other


def falsify(project: Project, digest: str, change: Callable[[Path], None]) -> str:
    """Make the store hold another artifact in place of `digest`, as if the stage had made that;
    its digest."""
    ledger = Ledger(project.root)
    objects = Objects(project.root, Digests(ledger))
    artifact = ledger.artifact(digest)
    assert artifact is not None
    staged = project.root / ".staging" / "falsified"
    shutil.copytree(objects.path(digest), staged, copy_function=shutil.copyfile)
    change(staged)
    other = objects.describe(staged, artifact.kind)
    objects.publish(staged, other, {})
    ledger.close()
    shutil.rmtree(objects.path(digest))
    with sqlite3.connect(project.root / FILE) as connection:
        connection.execute(
            "insert into artifacts select ?, kind, bytes, ?, label, state, created_at, "
            "verified_at from artifacts where digest = ?",
            (other.digest, json.dumps(other.files), digest),
        )
        for table in ("execution_outputs", "execution_inputs"):
            connection.execute(
                f"update {table} set digest = ? where digest = ?", (other.digest, digest)
            )
    connection.close()
    return other.digest


def flip_weight(path: Path, name: str) -> None:
    """The last element of a bf16 tensor becomes its neighbour."""
    entry = safetensors_header(path)[name]
    assert entry["dtype"] == "BF16"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + entry["data_offsets"][1] - 2] ^= 1  # little-endian: the lower byte
    path.write_bytes(data)


def flip_norm(folder: Path) -> None:
    flip_weight(folder / "model.safetensors", "model.norm.weight")


@pytest.fixture
def vocab(first_run: tuple[Project, Answer]) -> str:
    return str(first_run[1].outputs["vocab"]["vocab"])


@pytest.fixture
def head(first_run: tuple[Project, Answer]) -> str:
    return str(first_run[1].outputs["head"]["head"])


# What comes out the same


def test_an_artifact_is_made_again_from_what_the_store_holds(made: Project, vocab: str) -> None:
    before = made.objects()
    answer = reproduce(made, vocab[:8])
    assert answer.code == 0, answer.err
    assert answer.json["status"] == "identical"
    assert answer.json["hash"] == vocab
    assert statuses(answer) == {"rows": "reused", "vocab": "identical"}
    assert made.objects() == before
    assert list((made.root / ".staging").iterdir()) == []
    assert runs_of(made) == [("submit", "done"), ("reproduce", "done")]


def test_what_is_made_again_is_not_taken_for_the_first(made: Project, head: str) -> None:
    first = made.plan()["head"]["reasons"]
    assert reproduce(made, head).code == 0
    assert made.plan()["head"]["reasons"] == first
    assert made.cli("show", head, "--json").json["producers"][0]["disposition"] == "executed"


@pytest.mark.slow
def test_deep_runs_what_is_below_again_too(made: Project, vocab: str) -> None:
    answer = reproduce(made, vocab, "--deep")
    assert answer.code == 0, answer.err
    assert statuses(answer) == {"rows": "identical", "vocab": "identical"}


def test_what_a_reproduction_prints_for_people(made: Project, head: str) -> None:
    answer = made.cli("reproduce", head)
    assert answer.code == 0
    assert answer.out.splitlines()[0] == f"head\thead\tidentical\t{head}\t{head}"
    assert f"{head}: identical" in answer.err


def test_a_damaged_copy_gives_way_to_what_is_made_again(made: Project, head: str) -> None:
    weights = made.root / "objects" / head[:2] / head / "model.safetensors"
    weights.chmod(0o644)
    flip_weight(weights, "model.norm.weight")
    answer = reproduce(made, head)
    assert answer.code == 0
    assert "model.safetensors was altered" in differences(answer, "head")[0]["note"]
    assert made.plan()["head"]["action"] == "reuse"


# What comes out another


def test_a_weight_that_differs_is_named_with_how_far_it_is_off(made: Project, head: str) -> None:
    other = falsify(made, head, flip_norm)
    answer = reproduce(made, other)
    assert answer.code == 1, answer.err
    assert answer.json["status"] == "differs"
    (stage,) = answer.json["stages"]
    assert (stage["status"], stage["expected"], stage["found"]) == ("differs", other, head)
    (difference,) = stage["differences"]
    assert difference["file"] == "model.safetensors"
    assert difference["tensor"] == "model.norm.weight"
    assert (difference["max_ulp"], difference["differing"]) == (1, 1)
    assert 0 < difference["max_abs"] < 0.1
    assert {other, head} <= made.objects(), "neither is overwritten"
    assert made.plan()["head"]["action"] == "reuse"
    for again in (other, head):
        assert made.cli("show", again).code == 0


def test_a_report_that_differs_is_shown_field_by_field(made: Project, vocab: str) -> None:
    def change(folder: Path) -> None:
        report = json.loads((folder / "report.json").read_text("utf-8"))
        (folder / "report.json").write_text(json.dumps({**report, "filled": 1}), "utf-8")

    answer = reproduce(made, falsify(made, vocab, change))
    assert answer.code == 1
    (difference,) = differences(answer, "vocab")
    assert (difference["field"], difference["expected"]) == ("filled", 1)
    assert text(difference).startswith("report.json: filled 1 → ")


# What is refused


def test_a_source_that_changed_is_refused_and_nothing_runs(made: Project, vocab: str) -> None:
    # RPR-02
    data = bytearray(made.chats.read_bytes())
    data[100] ^= 1
    made.chats.write_bytes(data)
    answer = reproduce(made, vocab)
    assert answer.code == 2
    assert answer.json["status"] == "cannot"
    assert answer.json["run_id"] is None
    (wrong,) = answer.json["inputs"]
    assert (wrong["stage"], wrong["name"]) == ("rows", "chats.jsonl")
    assert wrong["expected"] != wrong["found"]
    for digest in (wrong["expected"], wrong["found"]):
        assert len(digest) == 64
        assert digest in answer.err
    assert runs_of(made) == [("submit", "done")]


def test_a_source_that_is_gone_is_refused_with_what_it_was(made: Project, vocab: str) -> None:
    # RPR-02
    made.chats.unlink()
    answer = reproduce(made, vocab)
    assert answer.code == 2
    (wrong,) = answer.json["inputs"]
    assert (wrong["name"], wrong["found"]) == ("chats.jsonl", None)
    assert wrong["expected"] in answer.err
    assert runs_of(made) == [("submit", "done")]


def test_a_verifier_that_changed_is_refused_by_the_file(made: Project, head: str) -> None:
    # RPR-02
    config = made.folder / "verifier" / "generation_config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    answer = reproduce(made, head)
    assert answer.code == 2
    assert [wrong["name"] for wrong in answer.json["inputs"]] == ["generation_config.json"]
    shutil.rmtree(made.folder / "verifier")
    answer = reproduce(made, head)
    assert answer.code == 2
    assert {wrong["found"] for wrong in answer.json["inputs"]} == {None}


def test_what_no_stage_made_cannot_be_made_again(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    run = first_run[1].json["run_id"]
    source = json.loads(made.cli("lineage", first_run[1].outputs["rows"]["rows"], "--json").out)
    (chats,) = (node["digest"] for node in source["nodes"] if node["label"] == "chats.jsonl")
    for given, message in (
        (chats, "came from outside"),
        (run, "is a run; give one of the artifacts"),
        ("0" * 64, "starts with 0000"),
    ):
        answer = reproduce(made, given)
        assert (answer.code, answer.json["status"]) == (2, "cannot")
        assert message in answer.err


def test_there_is_nothing_to_go_by_without_a_registry(project: Project) -> None:
    answer = reproduce(project, "0" * 64)
    assert (answer.code, answer.json["status"]) == (2, "cannot")
    assert "no registry" in answer.err


def test_a_stage_that_fails_cannot_be_compared(made: Project, head: str, tmp_path: Path) -> None:
    file = record_of(made, head, tmp_path / "record.json")
    blocked = tmp_path / "elsewhere"
    blocked.mkdir()
    (blocked / "objects").write_text("a file where a folder must be", "utf-8")
    answer = reproduce(
        made, head, "--record", str(file), "--sources", str(made.folder), root=blocked
    )
    assert (answer.code, answer.json["status"]) == (2, "cannot")
    assert answer.json["stages"][0]["error"]


def test_an_interrupt_ends_a_reproduction_in_order(made: Project, head: str) -> None:
    process = made.start("reproduce", head, "--json")
    worker_of(made.root)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert Answer(130, out, err).json["status"] == "interrupted"
    assert runs_of(made)[-1] == ("reproduce", "interrupted")
    assert list((made.root / ".staging").iterdir()) == []


# Elsewhere, from a record


@pytest.mark.slow
def test_a_record_and_the_sources_are_enough_in_a_fresh_root(
    made: Project, vocab: str, tmp_path: Path
) -> None:
    file = record_of(made, vocab, tmp_path / "record.json")
    moved = made.folder.rename(tmp_path / "moved")
    fresh = tmp_path / "fresh"
    arguments = ("--record", str(file), "--sources", str(moved))
    for expected in ("identical", "reused"):
        answer = reproduce(made, vocab[:12], *arguments, root=fresh)
        assert answer.code == 0, answer.err
        assert answer.json["status"] == "identical"
        assert statuses(answer) == {"rows": expected, "vocab": "identical"}
    assert (fresh / "objects" / vocab[:2] / vocab).is_dir()
    answer = made.cli("reproduce", vocab, "--json", root=fresh)
    assert answer.json["status"] == "identical", "the fresh root's registry will do by now"
    nodes = made.cli("lineage", vocab, "--up", "--json", root=fresh).json["nodes"]
    assert {"vocab", "rows", "source", "tokenizer"} <= {node["kind"] for node in nodes}


def test_a_record_says_what_an_absolute_path_led_to(head_project: Project, tmp_path: Path) -> None:
    verifier = head_project.folder / "verifier"
    head_project.write(HEAD.replace("path: verifier", f"path: {verifier}"))
    (digest,) = head_project.submit().outputs["head"].values()
    file = record_of(head_project, digest, tmp_path / "record.json")
    (tmp_path / "moved").mkdir()
    verifier.rename(tmp_path / "moved" / "verifier")
    arguments = ("--record", str(file), "--sources", str(tmp_path / "moved"))
    answer = reproduce(head_project, digest, *arguments, root=tmp_path / "fresh")
    assert answer.json["status"] == "identical", answer.err


def test_a_tensor_that_differs_is_named_where_only_the_record_is_at_hand(
    made: Project, head: str, tmp_path: Path
) -> None:
    other = falsify(made, head, flip_norm)
    file = record_of(made, other, tmp_path / "record.json")
    arguments = ("--record", str(file), "--sources", str(made.folder))
    answer = reproduce(made, other, *arguments, root=tmp_path / "fresh")
    assert answer.code == 1
    difference, note = differences(answer, "head")
    assert difference["tensor"] == "model.norm.weight"
    assert difference["expected"] != difference["found"]
    assert "no amounts" in note["note"]


def test_a_record_holds_what_led_to_its_target_and_no_more(
    made: Project, vocab: str, tmp_path: Path
) -> None:
    record = json.loads(record_of(made, vocab, tmp_path / "record.json").read_text("utf-8"))
    assert record["format"] == "kimi-eagle.record/1"
    assert record["target"] == vocab
    assert [stage["name"] for stage in record["stages"]] == ["rows", "vocab"]
    assert list(record["manifest"]["stages"]) == ["rows", "vocab"]
    assert {entry["kind"] for entry in record["artifacts"].values()} == {
        "source",
        "tokenizer",
        "rows",
        "vocab",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(format="other/1"), "is not a run record"),
        (lambda record: record["stages"][0].pop("key"), "is not a run record"),
        (lambda record: record.update(more=1), "is not a run record"),
        (lambda record: record["stages"][0]["outputs"].update(head="0" * 64), "was altered"),
        (lambda record: record["stages"][0].update(key="0" * 64), "was altered"),
        (lambda record: record["stages"][0]["document"].update(code_version=7), "was altered"),
        (lambda record: record["artifacts"].popitem(), "was altered"),
    ],
)
def test_an_altered_record_is_refused(
    made: Project,
    head: str,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    file = record_of(made, head, tmp_path / "record.json")
    record = json.loads(file.read_text("utf-8"))
    change(record)
    file.write_text(json.dumps(record), "utf-8")
    answer = reproduce(made, head, "--record", str(file), root=tmp_path / "fresh")
    assert (answer.code, answer.json["status"]) == (2, "cannot")
    assert message in answer.err


def test_a_record_of_something_else_is_refused(made: Project, head: str, tmp_path: Path) -> None:
    file = record_of(made, head, tmp_path / "record.json")
    answer = reproduce(made, "f" * 64, "--record", str(file))
    assert answer.code == 2
    assert f"is the record of head {head}" in answer.err


def test_code_that_makes_other_bytes_by_now_is_refused(
    made: Project, head: str, tmp_path: Path
) -> None:
    file = record_of(made, head, tmp_path / "record.json")
    older = altered(file, lambda record: record["stages"][0]["document"].update(code_version=1000))
    answer = reproduce(made, head, "--record", str(older))
    assert (answer.code, answer.json["status"]) == (2, "cannot")
    assert "the code of head has version 1 here, it had 1000 then" in answer.err
    assert runs_of(made) == [("submit", "done")]


def test_parameters_that_this_version_reads_otherwise_are_refused(
    made: Project, vocab: str, tmp_path: Path
) -> None:
    file = record_of(made, vocab, tmp_path / "record.json")
    other = altered(
        file,
        lambda record: record["stages"][1]["document"]["parameters"].update(unheard_of=1),
    )
    answer = reproduce(made, vocab, "--record", str(other))
    assert answer.code == 2
    assert "vocab would not be run as it was: unheard_of is gone (was 1)" in answer.err


# The environment


def test_a_changed_environment_is_told(made: Project, head: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "3", "VLLM_API_KEY": "secret"}
    process = made.start("reproduce", head, "--json", env=env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    changed = {item["name"]: item for item in json.loads(out)["environment"]["changed"]}
    assert changed["flags.OMP_NUM_THREADS"]["now"] == "3"
    assert changed["flags.OMP_NUM_THREADS"]["stages"] == ["head"]
    assert "secret" not in out


def test_only_what_both_environments_speak_of_is_compared() -> None:
    then = {"python": "3.11.1", "packages": {"torch": "2.12", "numpy": "2"}, "code": None}
    now = {
        "python": "3.12.0",
        "packages": {"torch": "2.13", "triton": "3", "numpy": "2"},
        "flags": {"OMP_NUM_THREADS": "1"},
        "code": {"commit": "a" * 40, "dirty": False, "diff": None},
    }
    assert [change.text() for change in changes(then, now)] == [
        f"code.commit none → {'a' * 12}",
        "packages.torch 2.12 → 2.13",
        "packages.triton none → 3",
        "python 3.11.1 → 3.12.0",
    ]
    assert changes(now, now) == []


def test_a_run_of_uncommitted_code_is_known_by_its_changes_and_told(tmp_path: Path) -> None:
    # RPR-01
    checkout = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "kimi_eagle", checkout / "kimi_eagle", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "migrations", checkout / "migrations")
    shutil.copyfile(ROOT / "pyproject.toml", checkout / "pyproject.toml")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "as it is")):
        subprocess.run(["git", "-C", checkout, *command], check=True)
    project = new_project(tmp_path / "project", HEAD)

    def kimi_eagle(*arguments: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "kimi_eagle", "--root", str(project.root), *arguments],
            cwd=checkout,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    source = checkout / "kimi_eagle" / "stages" / "head" / "run.py"
    clean = source.read_text("utf-8")
    source.write_text(clean + "# not committed\n", "utf-8")
    made = kimi_eagle("submit", str(project.manifest), "--json")
    assert made.code == 0, made.err
    (digest,) = made.outputs["head"].values()
    same = kimi_eagle("reproduce", digest, "--json")
    assert same.code == 0, same.err
    (warning,) = same.json["warnings"]
    assert "not committed" in warning
    assert "the checkout here has the same changes" in warning
    assert f"warning: {warning}" in same.err
    source.write_text(clean, "utf-8")
    other = kimi_eagle("reproduce", digest, "--json")
    assert "the checkout here does not have them" in other.json["warnings"][0]
    (change,) = other.json["environment"]["changed"]
    assert (change["name"], change["now"]) == ("code.diff", None)
    assert change["then"] in other.json["warnings"][0]
    assert len(change["then"]) == 64


@pytest.mark.slow
def test_an_environment_that_pip_cannot_make_is_told_in_its_words(
    made: Project, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    file = record_of(made, head, tmp_path / "record.json")

    def change(record: dict[str, Any]) -> None:
        record["stages"][0]["environment"]["packages"] = {"numpy": "0.0.1"}
        record["stages"][0]["environment"]["code"] = None

    older = altered(file, change)
    answer = reproduce(made, head, "--record", str(older), "--env", "recorded")
    assert (answer.code, answer.json["status"]) == (2, "cannot")
    assert "pip says: ERROR: No matching distribution found for numpy==0.0.1" in answer.err
    assert not list((made.root / ".envs").glob("*/ready.json"))


@pytest.mark.parametrize(
    "environment",
    [
        {"packages": {"--index-url": "1"}},
        {"packages": {"requests": "2.0"}},
        {"packages": {"numpy": "--pre"}},
        {"code": {"commit": "--output=x"}},
    ],
)
def test_a_record_cannot_have_anything_else_installed(
    made: Project, head: str, tmp_path: Path, environment: dict[str, Any]
) -> None:
    file = record_of(made, head, tmp_path / "record.json")
    other = altered(file, lambda record: record["stages"][0]["environment"].update(environment))
    answer = reproduce(made, head, "--record", str(other), "--env", "recorded")
    assert (answer.code, answer.json["status"]) == (2, "cannot")
    assert "is not one to install" in answer.err
    assert not list(made.root.glob(".envs/*/bin"))


# Losses and tolerances


def losses(*values: float, name: str = "loss") -> list[LossRecord]:
    return [LossRecord("train", step, {name: value}) for step, value in enumerate(values, 1)]


def test_the_first_loss_that_parts_is_found() -> None:
    assert first_parting(losses(3, 2, 1), losses(3, 2, 1)) == []
    (found,) = first_parting(losses(3, 2, 1), losses(3, 2.5, 1.5))
    assert text(found) == "the losses part at step 2: train loss 2.0 → 2.5"
    (found,) = first_parting(losses(3, 2), losses(3))
    assert text(found) == "2 losses were logged then, 1 now"
    (found,) = first_parting([LossRecord("val", 1, {"a": 1, "b": 2})], [LossRecord("val", 1, {})])
    assert found["at"] == "the end of epoch 1"


def test_rows_are_within_a_tolerance_only_when_all_were_compared() -> None:
    rows = {"rows": 2, "of": 9, "compared": 2, "cosine_distance": 0.01, "max_abs": 1.0}
    assert within([rows], 0.02)
    assert not within([rows], 0.001)
    assert not within([{**rows, "compared": 1}], 0.02)
    assert not within([rows, {"note": "anything else"}], 0.02)
    assert not within([], 0.02)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Answer]:
    project = new_project(tmp_path_factory.mktemp("trained") / "project", TRAINING)
    answer = project.submit()
    assert answer.code == 0, answer.err
    return project, answer


@pytest.mark.slow
def test_a_training_comes_out_the_same_twice_from_its_record_alone(
    trained: tuple[Project, Answer], tmp_path: Path
) -> None:
    # RPR-06
    project, answer = trained
    (digest,) = answer.outputs["draft"].values()
    file = record_of(project, digest, tmp_path / "record.json")
    record = json.loads(file.read_text("utf-8"))
    assert [item["at"] for item in record["stages"][-1]["losses"] if item["split"] == "train"]
    sources = tmp_path / "sources"
    shutil.copytree(project.folder / "verifier", sources / "verifier")
    shutil.copyfile(project.chats, sources / "chats.jsonl")
    arguments = ("--record", str(file), "--sources", str(sources), "--deep")
    for number in range(2):
        again = reproduce(project, digest, *arguments, root=tmp_path / f"fresh{number}")
        assert again.code == 0, again.err
        assert again.json["status"] == "identical"
        assert set(statuses(again).values()) == {"identical"}
        assert len(statuses(again)) == 5


@pytest.mark.slow
def test_deleted_outputs_are_made_again_the_same_and_then_reused(
    trained: tuple[Project, Answer], tmp_path: Path
) -> None:
    # RPR-06
    project = trained[0].copy(tmp_path / "project")
    (digest,) = trained[1].outputs["draft"].values()
    shutil.rmtree(project.root / "objects")
    shutil.rmtree(project.root / "states")
    answer = reproduce(project, digest)
    assert answer.code == 0, answer.err
    assert set(statuses(answer).values()) == {"identical"}
    answer = reproduce(project, digest)
    assert statuses(answer)["states"] == "reused", "its rows are kept, for the store lacked them"
    assert answer.json["status"] == "identical"
    assert set(project.submit().dispositions.values()) == {"reused"}


@pytest.mark.slow
def test_a_training_that_differs_says_where_its_losses_part(
    trained: tuple[Project, Answer], tmp_path: Path
) -> None:
    project, answer = trained[0].copy(tmp_path / "project"), trained[1]
    (digest,) = answer.outputs["draft"].values()
    other = falsify(
        project, digest, lambda folder: flip_weight(folder / "model.safetensors", "fc.weight")
    )
    events = project.root / answer.json["run_id"] / "stages" / "draft.events"
    lines = [json.loads(line) for line in events.read_text("utf-8").splitlines()]
    for line in lines:
        if line.get("step") == 2:
            line["values"]["loss"] += 1
    events.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    again = reproduce(project, other)
    assert again.code == 1, again.err
    assert statuses(again)["draft"] == "differs"
    tensors, parting = differences(again, "draft")
    assert (tensors["tensor"], tensors["max_ulp"]) == ("fc.weight", 1)
    assert (parting["loss"], parting["at"]) == ("train loss", "step 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "status", "code"), [(1.01, "within_tolerance", 0), (-1.0, "differs", 1)]
)
def test_states_are_held_against_the_tolerance_of_their_kind(
    trained: tuple[Project, Answer], tmp_path: Path, factor: float, status: str, code: int
) -> None:
    project, answer = trained[0].copy(tmp_path / "project"), trained[1]
    (digest,) = answer.outputs["states"].values()
    other = distort(project, digest, factor)
    again = reproduce(project, other)
    assert again.code == code, again.err
    assert again.json["status"] == status
    assert statuses(again) == {"rows": "reused", "states": status}
    found = differences(again, "states")[0]
    assert (found["rows"], found["of"], found["compared"]) == (1, 10, 1)
    assert found["max_abs"] > 0
    assert (found["cosine_distance"] <= 0.02) == (code == 0)
    assert again.json["stages"][1]["found"] == digest


def distort(project: Project, digest: str, factor: float) -> str:
    """Make the store hold the first row of a states artifact multiplied by a factor, as if the
    verifier had said so; the artifact's digest."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from kimi_eagle.records import ShardRecord
    from kimi_eagle.states.shard_file import content_digest

    (shard,) = (project.root / "states").glob("*/*.safetensors")
    with safe_open(shard, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    listing = json.loads(shard.with_suffix(".json").read_text("utf-8"))
    _, start, tokens, before = listing["rows"][0]
    states = tensors["hidden_states"]
    if factor < 0:
        states[start : start + tokens] *= factor
    else:
        states[start, -1, :8] *= factor
    after = content_digest(states[start : start + tokens].view(torch.uint8).numpy())
    listing["rows"][0][3] = after
    shard.chmod(0o644)
    shard.unlink()
    staged = project.root / "distorted.safetensors"
    save_file(tensors, staged, metadata=metadata)
    ledger = Ledger(project.root)
    found, size = Digests(ledger).of(staged)
    ledger.drop_shard(shard.stem)
    target = project.root / "states" / found[:2] / f"{found}.safetensors"
    target.parent.mkdir(exist_ok=True)
    staged.rename(target)
    target.with_suffix(".json").write_text(json.dumps(listing), "utf-8")
    ledger.add_shard(ShardRecord(found, size, tuple(tuple(row) for row in listing["rows"])))
    ledger.close()

    def change(folder: Path) -> None:
        rows = folder / "rows.txt"
        rows.write_text(rows.read_text("utf-8").replace(before, after), "utf-8")

    return falsify(project, digest, change)
