"""Runs of real stages: what runs, what is reused, and what a fault leaves behind."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    HEAD,
    LIGHT,
    Answer,
    Project,
    halted_worker_of,
    kill,
    new_project,
    wait_for,
    worker_of,
    workers,
)

REUSED = {"head": "reused", "rows": "reused", "vocab": "reused"}


def flip(path: Path, at: int = -1) -> None:
    """Change one byte of a file that nobody should change."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def left_in_staging(project: Project) -> list[str]:
    return [path.name for path in (project.root / ".staging").glob("*")]


def whole(project: Project) -> bool:
    """Whether every object in the store is what its record says."""
    from kimi_eagle.artifacts.digests import Digests
    from kimi_eagle.artifacts.objects import Objects
    from kimi_eagle.registry.store import Registry

    registry = Registry(project.root)
    objects = Objects(project.root, Digests(registry))
    try:
        records = [registry.artifact(digest) for digest in project.objects()]
        return all(record is not None and objects.trouble(record) is None for record in records)
    finally:
        registry.close()


@pytest.fixture
def reference(first_run: tuple[Project, Answer]) -> dict[str, dict[str, str]]:
    """The outputs of an unbroken run."""
    return first_run[1].outputs


# What is reused


def test_a_second_run_executes_nothing(made: Project, reference: dict[str, dict[str, str]]) -> None:
    # RUN-15
    again = made.submit()
    assert again.code == 0
    assert again.dispositions == REUSED
    assert again.outputs == reference


def test_touched_and_copied_sources_run_nothing(made: Project, tmp_path: Path) -> None:
    # RUN-17
    for path in [made.chats, *(made.folder / "verifier").iterdir()]:
        path.touch()
    assert made.submit().dispositions == REUSED
    elsewhere = made.copy(tmp_path / "elsewhere")
    assert elsewhere.submit().dispositions == REUSED
    assert made.cli("submit", str(elsewhere.manifest), "--json").dispositions == REUSED


def test_temporary_folder_working_folder_and_renaming_run_nothing(
    made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RUN-05
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path / "other")
    made.chats.rename(made.folder / "renamed.jsonl")
    (made.folder / "verifier").rename(made.folder / "model")
    text = LIGHT.replace("chats.jsonl", "../project/renamed.jsonl").replace("verifier}", "model}")
    made.write("# a comment\n" + text.replace("name: light", "name: other"))
    assert made.submit().dispositions == REUSED


def test_the_place_of_a_project_and_of_its_root_is_in_no_hash(
    first_run: tuple[Project, Answer], tmp_path: Path
) -> None:
    # RPR-04
    there = new_project(tmp_path / "b" / "other place", HEAD)
    head = there.submit(root=tmp_path / "another root").json["stages"][0]
    expected = first_run[1].json["stages"][0]
    assert (head["key"], head["outputs"]) == (expected["key"], expected["outputs"])
    fresh = new_project(tmp_path / "c").plan()
    for stage in first_run[1].json["stages"]:
        assert fresh[stage["name"]]["key"] in (stage["key"], None)


@pytest.mark.slow
def test_a_changed_setting_runs_its_stage_and_reuses_the_rest(made: Project) -> None:
    # RUN-02, VOC-06
    answer = made.submit("--set", "stages.vocab.size=64")
    assert answer.dispositions == {**REUSED, "vocab": "executed"}
    assert answer.json["stages"][2]["metrics"]["size"] == 64
    assert made.submit().dispositions == REUSED, "the earlier one is still there"


@pytest.mark.slow
def test_an_input_that_gives_the_same_rows_again_stops_there(
    made: Project, reference: dict[str, dict[str, str]]
) -> None:
    # RUN-17
    packed = made.folder / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress(made.chats.read_bytes(), mtime=1))
    made.write(LIGHT.replace("chats.jsonl", "chats.jsonl.gz"))
    answer = made.submit()
    assert answer.dispositions == {**REUSED, "rows": "executed"}
    assert answer.outputs == reference


@pytest.mark.slow
def test_packing_the_same_data_at_another_time_stops_at_the_rows(made: Project) -> None:
    # RUN-17
    packed = made.folder / "chats.jsonl.gz"
    made.write(LIGHT.replace("chats.jsonl", "chats.jsonl.gz"))
    outputs = []
    for moment in (1, 2):
        packed.write_bytes(gzip.compress(made.chats.read_bytes(), mtime=moment))
        answer = made.submit()
        assert answer.dispositions == {**REUSED, "rows": "executed"}
        outputs.append(answer.outputs)
    assert outputs[0] == outputs[1]


# What is damaged


@pytest.mark.parametrize("harm", ["delete", "flip", "truncate"])
def test_a_damaged_output_is_noticed_and_made_again(
    made: Project, reference: dict[str, dict[str, str]], harm: str
) -> None:
    # RUN-14; the head is taken by no other stage here
    folder = made.root / "objects"
    (digest,) = reference["head"].values()
    victim = folder / digest[:2] / digest / "model.safetensors"
    if harm == "delete":
        victim.unlink()
    elif harm == "flip":
        flip(victim)
    else:
        os.truncate(victim, 100)
    planned = made.plan()
    assert {name: stage["action"] for name, stage in planned.items()} == {
        "head": "run",
        "rows": "reuse",
        "vocab": "reuse",
    }
    assert "model.safetensors" in planned["head"]["reasons"][0]
    answer = made.submit()
    assert answer.dispositions == {**REUSED, "head": "executed"}
    assert answer.outputs == reference
    assert whole(made)


def test_a_damaged_input_that_nothing_needs_is_left(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    # RUN-14
    flip(made.object_of(first_run[1], "rows") / "rows.safetensors")
    assert "gone from the disk, but nothing needs it" in made.plan()["rows"]["reasons"]
    assert made.submit().dispositions == REUSED


@pytest.mark.slow
def test_a_damaged_input_is_made_again_before_what_needs_it(
    made: Project, first_run: tuple[Project, Answer], reference: dict[str, dict[str, str]]
) -> None:
    # RUN-14
    flip(made.object_of(first_run[1], "rows") / "rows.safetensors")
    answer = made.submit("--set", "stages.vocab.size=64")
    assert answer.dispositions == {"head": "reused", "rows": "executed", "vocab": "executed"}
    assert answer.outputs["rows"] == reference["rows"]
    assert whole(made)


@pytest.mark.slow
def test_a_lost_store_is_made_again_with_the_same_hashes(
    made: Project, reference: dict[str, dict[str, str]]
) -> None:
    # RPR-06
    shutil.rmtree(made.root / "objects")
    answer = made.submit()
    assert set(answer.dispositions.values()) == {"executed"}
    assert answer.outputs == reference
    assert whole(made)


# What fails


def test_a_failed_stage_says_why_and_is_never_taken_for_done(head_project: Project) -> None:
    # RUN-13
    index = head_project.folder / "verifier" / "model.safetensors.index.json"
    text = index.read_text("utf-8")
    index.write_text(text.replace("lm_head", "lm_haed"), "utf-8")
    for _ in range(2):
        answer = head_project.submit()
        assert answer.code == 1
        assert answer.json["status"] == "failed"
        assert answer.dispositions == {"head": "failed"}
        assert "stale" in answer.json["stages"][0]["error"]
        assert "head: FAILED" in answer.err
        assert head_project.objects() == set()
        assert left_in_staging(head_project) == []
    index.write_text(text, "utf-8")
    assert head_project.submit().dispositions == {"head": "executed"}


@pytest.mark.slow
def test_a_stage_that_cannot_go_on_says_why_and_what_follows_is_not_tried(
    project: Project,
) -> None:
    project.write(LIGHT.replace("  head: {kind: head}\n", ""))
    (project.folder / "verifier" / "tokenizer.json").write_text("{}", "utf-8")
    answer = project.submit()
    assert answer.code == 1
    assert answer.dispositions == {"rows": "failed"}
    assert "tokenizer" in answer.json["stages"][0]["error"]
    assert answer.json["stages"][0]["error"] in answer.err
    assert str(project.root / answer.json["run_id"] / "stages" / "rows.log") in answer.err


@pytest.mark.slow
def test_what_was_done_before_a_failure_is_kept(head_project: Project) -> None:
    head_project.write(LIGHT)
    head_project.chats.write_text('{"messages": []}\n', "utf-8")
    answer = head_project.submit()
    assert answer.code == 1
    assert answer.dispositions == {"head": "executed", "rows": "failed"}
    assert head_project.plan()["head"]["action"] == "reuse"


@pytest.mark.parametrize("path", ["nowhere", "moonshotai/Kimi-K2.5"])
def test_a_verifier_that_is_not_there_is_told_in_one_line_before_any_stage(
    head_project: Project, path: str
) -> None:
    # CLI-04
    head_project.write(HEAD.replace("{path: verifier}", f"{{path: {path}}}"))
    answer = head_project.submit()
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert line.startswith(f"{head_project.manifest}:3:18: verifier.path: ")
    assert "does not exist" in line
    assert not head_project.root.exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", "no file at"),
        ("*.parquet", "no file at"),
        ("verifier", "is a model's folder"),
        ("*ifier", "is not a file"),
        ("manifest.yaml", "unsupported: .yaml"),
    ],
)
def test_a_source_that_is_not_there_is_told_before_any_stage(
    project: Project, path: str, message: str
) -> None:
    project.write(LIGHT.replace("chats.jsonl", f"'{path}'"))
    answer = project.submit()
    assert answer.code == 2
    assert "6:42: stages.rows.sources.0.path: " in answer.err
    assert message in answer.err
    assert project.cli("runs", "--json").json == {"runs": []}


def test_an_input_that_changes_while_a_stage_runs_taints_what_was_made(
    head_project: Project,
) -> None:
    process = head_project.start_submit()
    worker = halted_worker_of(head_project.root)
    config = head_project.folder / "verifier" / "generation_config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    kill(worker, signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "generation_config.json changed while head was under way" in err
    assert head_project.objects() == set()
    assert head_project.submit().dispositions == {"head": "executed"}


# What is killed


def no_worker_is_left(project: Project) -> None:
    wait_for(lambda: not workers(project.root), "the end of every worker")


def test_a_killed_worker_fails_its_stage_and_the_next_run_is_as_if_nothing_was(
    head_project: Project, reference: dict[str, dict[str, str]]
) -> None:
    # RUN-07
    process = head_project.start_submit()
    kill(worker_of(head_project.root))
    _, err = process.communicate()
    assert process.returncode == 1
    assert "was ended by signal 9" in err
    assert "the end of its log" in err
    no_worker_is_left(head_project)
    assert head_project.objects() == set()
    assert left_in_staging(head_project) == []
    answer = head_project.submit()
    assert answer.dispositions == {"head": "executed"}
    assert answer.outputs["head"] == reference["head"]


def statuses(project: Project) -> list[str]:
    return [run["status"] for run in project.cli("runs", "--json").json["runs"]]


def test_a_killed_runner_takes_its_worker_along_and_the_next_run_is_as_if_nothing_was(
    head_project: Project, reference: dict[str, dict[str, str]]
) -> None:
    # RUN-07
    process = head_project.start_submit()
    worker_of(head_project.root)
    kill(process.pid)
    process.communicate()
    no_worker_is_left(head_project)
    assert head_project.objects() == set()
    answer = head_project.submit()
    assert answer.dispositions == {"head": "executed"}
    assert answer.outputs["head"] == reference["head"]
    assert statuses(head_project) == ["done", "interrupted"]
    assert left_in_staging(head_project) == []


def test_a_killed_guard_leaves_no_worker(head_project: Project) -> None:
    process = head_project.start_submit()
    worker_of(head_project.root)
    (guard,) = (
        pid for pid, line in workers(head_project.root).items() if line[1].endswith("guard.py")
    )
    kill(guard)
    process.communicate()
    assert process.returncode == 1
    no_worker_is_left(head_project)
    assert head_project.objects() == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_worker_and_says_so(
    head_project: Project, number: signal.Signals
) -> None:
    # RUN-08
    process = head_project.start_submit()
    worker_of(head_project.root)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert Answer(130, out, err).json["status"] == "interrupted"
    assert workers(head_project.root) == {}
    assert head_project.objects() == set()
    assert left_in_staging(head_project) == []
    assert statuses(head_project) == ["interrupted"]
    shown = head_project.cli("runs", "--json").json["runs"][0]
    assert [stage["disposition"] for stage in shown["stages"]] == ["interrupted"]


def test_an_interrupt_from_the_terminal_does_not_reach_the_worker_past_the_runner(
    head_project: Project,
) -> None:
    # ctrl-c signals the whole foreground group: the worker must not be in it
    process = head_project.start_submit()
    worker = worker_of(head_project.root)
    assert os.getpgid(worker) != os.getpgid(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.4, 0.8, 1.6, 2.4])
def test_a_kill_at_any_moment_is_made_good_by_the_next_run(
    head_project: Project, reference: dict[str, dict[str, str]], delay: float
) -> None:
    # RUN-07
    process = head_project.start_submit()
    time.sleep(delay)
    kill(process.pid)
    process.communicate()
    no_worker_is_left(head_project)
    answer = head_project.submit()
    assert answer.code == 0
    assert answer.outputs["head"] == reference["head"]
    assert whole(head_project)
    assert left_in_staging(head_project) == []
    assert set(statuses(head_project)) <= {"done", "interrupted"}


# Several at once


def together(project: Project, count: int) -> list[Answer]:
    """Answers of submits that were started at once."""
    processes = [project.start_submit() for _ in range(count)]
    said = [process.communicate() for process in processes]
    return [Answer(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def test_two_runs_of_one_manifest_execute_each_stage_once(head_project: Project) -> None:
    answers = together(head_project, 2)
    assert [answer.code for answer in answers] == [0, 0], [answer.err for answer in answers]
    assert sorted(answer.dispositions["head"] for answer in answers) == ["executed", "reused"]
    assert answers[0].outputs == answers[1].outputs
    assert statuses(head_project) == ["done", "done"]


@pytest.mark.slow
def test_four_runs_of_one_manifest_execute_each_of_its_stages_once(
    project: Project, reference: dict[str, dict[str, str]]
) -> None:
    answers = together(project, 4)
    assert [answer.code for answer in answers] == [0] * 4
    for stage in reference:
        assert [answer.dispositions[stage] for answer in answers].count("executed") == 1
    assert all(answer.outputs == reference for answer in answers)


def test_a_run_whose_forerunner_dies_makes_the_stage_itself(head_project: Project) -> None:
    first = head_project.start_submit()
    halted_worker_of(head_project.root)
    second = head_project.start_submit()
    assert second.stderr is not None
    for line in second.stderr:
        if "another run is making it; waiting" in line:
            break
    kill(first.pid)
    first.communicate()
    out, err = second.communicate()
    assert second.returncode == 0, err
    assert Answer(0, out, err).dispositions == {"head": "executed"}


# What is kept of a run


def test_a_run_keeps_its_manifest_environment_logs_and_outcome(
    first_run: tuple[Project, Answer],
) -> None:
    project, answer = first_run
    folder = project.root / answer.json["run_id"]
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"manifest.yaml", "resolved.json", "environment.json", "outcome.json"} < kept
    assert {f"stages/{name}.{end}" for name in REUSED for end in ("log", "json")} < kept
    assert (folder / "manifest.yaml").read_text("utf-8") == LIGHT


def test_the_base_package_plans_and_queries_without_the_heavy_ones(
    first_run: tuple[Project, Answer],
) -> None:
    project, _ = first_run
    code = (
        "import sys\n"
        "from kimi_eagle.cli import main\n"
        "heavy = {'torch', 'transformers', 'vllm', 'speculators', 'ray', 'rich', 'numpy'}\n"
        "for arguments in (['plan', sys.argv[2]], ['runs'], ['validate', sys.argv[2]]):\n"
        "    assert main(['--root', sys.argv[1], *arguments]) == 0\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    arguments = [sys.executable, "-c", code, str(project.root), str(project.manifest)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
