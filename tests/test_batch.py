"""A batch system's manners: runs that go on alone, and what is asked of them from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cases import case_input
from conftest import HEAD, Answer, Project, halted_worker_of, wait_for, workers

from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.commands.runs import since
from kimi_eagle.identity import digest_bytes
from kimi_eagle.registry.schema import FILE
from kimi_eagle.runner import ALIVE


def said(process: subprocess.Popen[str]) -> Answer:
    out, err = process.communicate(timeout=120)
    return Answer(process.returncode, out, err)


def detach(project: Project) -> str:
    """Submit without a terminal; the id of the run."""
    answer = said(project.start("submit", str(project.manifest), "--detach"))
    assert answer.code == 0, answer.err
    (run_id,) = answer.out.split()
    return run_id


def row(project: Project, run_id: str) -> dict[str, Any]:
    """A run as the registry holds it, whatever is shown of it."""
    connection = sqlite3.connect(project.root / FILE)
    connection.row_factory = sqlite3.Row
    try:
        return dict(connection.execute("select * from runs where id = ?", (run_id,)).fetchone())
    finally:
        connection.close()


def change(project: Project, run_id: str, **values: Any) -> None:
    with sqlite3.connect(project.root / FILE) as connection:
        for name, value in values.items():
            connection.execute(f"update runs set {name} = ? where id = ?", (value, run_id))
    connection.close()


@contextmanager
def detach_held(project: Project) -> Iterator[str]:
    """Submit without a terminal and hold its stage up before it can end; the id of the run."""
    process = project.start("submit", str(project.manifest), "--detach")
    worker = halted_worker_of(project.root)
    try:
        answer = said(process)
        assert answer.code == 0, answer.err
        yield answer.out.strip()
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


def ended(project: Project, run_id: str) -> str:
    """Wait for a run's end; its status."""
    return str(
        wait_for(
            lambda: (status := row(project, run_id)["status"]) != "running" and status,
            "the end of the run",
        )
    )


@pytest.fixture
def failed(head_project: Project) -> tuple[Project, str]:
    """A run that failed."""
    index = head_project.folder / "verifier" / "model.safetensors.index.json"
    index.write_text(index.read_text("utf-8").replace("lm_head", "lm_haed"), "utf-8")
    head_project.write(HEAD + "  rows: {kind: prepare, sources: [{path: chats.jsonl}]}\n")
    answer = head_project.submit()
    assert answer.code == 1
    return head_project, str(answer.json["run_id"])


# submit --detach


def test_a_detached_run_goes_on_alone_and_keeps_what_it_prints(head_project: Project) -> None:
    with detach_held(head_project) as run_id:
        run = row(head_project, run_id)
        assert run["status"] == "running", "it was in the registry before its id was printed"
        assert os.getsid(run["pid"]) == run["pid"], "a session of its own"
        assert head_project.cli("runs", "--status", "running").out.startswith(run_id)
    assert ended(head_project, run_id) == "done"
    log = head_project.root / run_id / "submit.log"
    wait_for(lambda: f"run {run_id}: done" in log.read_text("utf-8"), "the end of its log")
    assert "head: done in" in log.read_text("utf-8")
    assert head_project.cli("logs", run_id).out == log.read_text("utf-8")


def test_a_detached_run_outlives_a_terminal_that_hangs_up(head_project: Project) -> None:
    process = head_project.start("submit", str(head_project.manifest), "--detach", "--json")
    answer = said(process)
    assert answer.json["status"] == "running"
    pid = row(head_project, answer.json["run_id"])["pid"]
    assert os.getpgid(pid) != process.pid, "a hang-up goes to the terminal's process groups"
    assert ended(head_project, answer.json["run_id"]) == "done"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_detached_submit_of_a_bad_manifest_says_so_itself(
    head_project: Project, as_json: bool
) -> None:
    head_project.write(HEAD.replace("kind: head}", "kind: haed}"))
    arguments = ["--json"] if as_json else []
    answer = said(head_project.start("submit", str(head_project.manifest), "--detach", *arguments))
    assert answer.code == 2
    assert f"{head_project.manifest}:5:16: stages.head.kind" in answer.err
    assert answer.out == "" if not as_json else answer.json["status"] == "error"
    assert not head_project.root.exists()


def test_a_detached_submit_without_its_sources_begins_no_run(project: Project) -> None:
    project.chats.unlink()
    answer = said(project.start("submit", str(project.manifest), "--detach"))
    assert (answer.code, answer.out) == (2, "")
    assert "no file at" in answer.err
    assert project.cli("runs", "--json").json == {"runs": []}


# logs


def test_logs_follow_a_stage_from_before_it_has_a_log_to_its_end(head_project: Project) -> None:
    with detach_held(head_project) as run_id:
        log = head_project.root / run_id / "stages" / "head.log"
        log.unlink()
        process = head_project.start("logs", "latest", "head", "-f")
        assert process.stdout is not None
        log.write_bytes("früh\n".encode())
        assert process.stdout.readline() == "früh\n"
        with log.open("ab") as file:
            file.write(b"\xff spat\n")
        assert process.stdout.readline() == "\ufffd spat\n"
        assert process.poll() is None, "the stage goes on, and so does this"
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0
    assert head_project.cli("logs", run_id, "head").out == "früh\n\ufffd spat\n"


def test_logs_without_a_stage_tell_how_the_run_went(
    first_run: tuple[Project, Answer], failed: tuple[Project, str]
) -> None:
    project, answer = first_run
    lines = project.cli("logs", answer.json["run_id"][:6]).out.splitlines()
    assert [line.split(" in ")[0] for line in lines[1:]] == [
        "head: done",
        "rows: done",
        "vocab: done",
    ]
    project, run_id = failed
    assert "head: FAILED" in project.cli("logs", run_id, "-f").out


def test_logs_of_a_reused_stage_are_those_of_the_run_that_made_it(made: Project) -> None:
    first = made.cli("runs", "--json").json["runs"][0]["id"]
    log = made.root / first / "stages" / "rows.log"
    log.write_text("made here\n")
    again = made.submit().json["run_id"]
    answer = made.cli("logs", again, "rows", "-f")
    assert answer.out == "made here\n"
    assert f"made by run {first}" in answer.err


def test_logs_of_a_stage_that_is_not_there_are_refused(failed: tuple[Project, str]) -> None:
    project, run_id = failed
    answer = project.cli("logs", run_id, "draft")
    assert answer.code == 2
    assert "no stage 'draft'; its stages are head, rows" in answer.err
    answer = project.cli("logs", run_id, "rows", "-f")
    assert answer.code == 2
    assert f"rows never began: run {run_id} is failed" in answer.err


# attach


def test_attach_shows_what_submit_shows(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    attached = project.cli("attach", answer.json["run_id"], "--json")
    assert attached.code == 0
    assert attached.json == answer.json
    assert "rows: done in" in attached.err
    assert "rows: running" not in attached.err, "it is not running any more"


def test_attach_to_a_reused_run_names_the_run_that_made_it(made: Project) -> None:
    first = made.cli("runs", "--json").json["runs"][0]["id"]
    again = made.submit()
    attached = made.cli("attach", "latest", "--json")
    assert attached.json["run_id"] == again.json["run_id"]
    assert attached.dispositions == again.dispositions
    assert f"rows: reused from run {first}" in attached.err


def test_attach_follows_a_run_to_its_end_and_ctrl_c_leaves_it_alone(head_project: Project) -> None:
    with detach_held(head_project) as run_id:
        process = head_project.start("attach", run_id)
        assert process.stderr is not None
        assert process.stderr.readline().startswith(f"run {run_id}")
        assert process.stderr.readline() == "head: running\n"
        process.send_signal(signal.SIGINT)
        answer = said(process)
        assert answer.code == 130
        assert answer.err.splitlines() == [f"detached; run {run_id} goes on without you"]
        assert row(head_project, run_id)["status"] == "running"
        again = head_project.start("attach", run_id, "--json")
    answer = said(again)
    assert answer.code == 0
    assert answer.dispositions == {"head": "executed"}


def test_attach_passes_progress_on_while_the_stage_runs(head_project: Project) -> None:
    with detach_held(head_project) as run_id:
        (events,) = (head_project.root / ".staging").glob(f"{run_id}-head-*")
        with (events / "events.ndjson").open("a") as file:
            for done in (3, 4):
                event = {"event": "progress", "done": done, "total": 10, "unit": "tensors"}
                file.write(json.dumps(event) + "\n")
            file.write(json.dumps({"event": "note", "text": "look out"}) + '\n{"event')
        process = head_project.start("attach", run_id)
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(4)]
        assert lines[2:] == ["head: 4 of 10 tensors\n", "head: look out\n"]
        process.send_signal(signal.SIGINT)
        said(process)


def test_attach_ends_with_the_code_that_submit_ended_with(failed: tuple[Project, str]) -> None:
    project, run_id = failed
    answer = project.cli("attach", run_id)
    assert answer.code == 1
    assert "head: FAILED" in answer.err
    change(project, run_id, status="interrupted")
    assert project.cli("attach", run_id).code == 130


# cancel


def test_cancel_ends_a_run_and_waits_until_that_is_recorded(head_project: Project) -> None:
    with detach_held(head_project) as run_id:
        answer = head_project.cli("cancel", run_id[:6], "--json")
    assert answer.code == 0, answer.err
    assert answer.json == {"run_id": run_id, "status": "interrupted"}
    assert workers(head_project.root) == {}
    assert head_project.objects() == set()
    again = head_project.cli("cancel", run_id)
    assert again.code == 2
    assert f"run {run_id} is not running: interrupted since 20" in again.err
    assert head_project.submit().dispositions == {"head": "executed"}


def test_cancelling_twice_ends_a_stage_that_does_not_stop(head_project: Project) -> None:
    with detach_held(head_project) as run_id:  # it cannot answer a request to end
        answer = head_project.cli("cancel", run_id, "--wait", "0")
        assert answer.code == 2
        assert "cancelling it again ends its stage at once" in answer.err
        answer = head_project.cli("cancel", run_id)
        assert answer.code == 0, answer.err
        wait_for(lambda: not workers(head_project.root), "the end of the worker")


def test_a_run_whose_coordinator_died_is_lost_until_somebody_records_it(
    head_project: Project,
) -> None:
    with detach_held(head_project) as run_id:
        os.kill(row(head_project, run_id)["pid"], signal.SIGKILL)
    (shown,) = wait_for(
        lambda: head_project.cli("runs", "--status", "lost", "--json").json["runs"], "the loss"
    )
    assert shown["status"] == "lost"
    assert [stage["disposition"] for stage in shown["stages"]] == ["lost"]
    assert head_project.cli("runs", "--status", "running", "--json").json["runs"] == []
    assert head_project.cli("show", run_id, "--json").json["status"] == "lost"
    assert "kimi-eagle cancel" in head_project.cli("show", run_id).out
    assert head_project.cli("logs", run_id, "head", "-f").code == 0
    assert row(head_project, run_id)["status"] == "running", "to look at it changes nothing"
    answer = head_project.cli("cancel", run_id)
    assert answer.code == 0
    assert answer.out == f"run {run_id}: interrupted\n"
    assert "had lost its coordinator" in answer.err
    assert row(head_project, run_id)["status"] == "interrupted"
    kept = json.loads((head_project.root / run_id / "run.json").read_text("utf-8"))
    assert kept["status"] == "interrupted"
    (run,) = head_project.cli("runs", "--json").json["runs"]
    assert [stage["disposition"] for stage in run["stages"]] == ["interrupted"]


def test_attach_takes_a_run_over_whose_coordinator_died(project: Project) -> None:
    with detach_held(project) as run_id:
        os.kill(row(project, run_id)["pid"], signal.SIGKILL)
    answer = said(project.start("attach", run_id, "--json"))
    assert answer.code == 0, answer.err
    assert answer.json["run_id"] == run_id
    assert answer.dispositions == dict.fromkeys(["head", "rows", "vocab"], "executed")
    (run,) = project.cli("runs", "--json").json["runs"]
    assert len(run["stages"]) == 3
    # a run that has ended is nobody's to take over
    assert said(project.start("attach", run_id, "--json")).dispositions == answer.dispositions


def test_cancel_leaves_a_process_alone_that_is_not_the_coordinator(made: Project) -> None:
    # its id may have come to mean another process, of another container for example
    (run,) = made.cli("runs", "--json").json["runs"]
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    change(made, run["id"], status="running", pid=other.pid, host=socket.gethostname())
    with Lock(made.root / run["id"] / ALIVE):
        answer = made.cli("cancel", run["id"], "--wait", "1")
        assert answer.code == 2
        assert f"process {other.pid} is not it" in answer.err
        change(made, run["id"], host="elsewhere")
        answer = made.cli("cancel", run["id"], "--wait", "1")
        assert answer.code == 2
        assert "is coordinated on elsewhere: cancel it there" in answer.err
    assert other.poll() is None
    other.communicate(b"\n")
    assert other.returncode == 0


# Which run


@pytest.mark.parametrize("command", ["logs", "attach", "cancel", "openlineage"])
def test_a_run_is_named_by_an_unambiguous_start_or_as_the_latest(
    made: Project, command: str
) -> None:
    def refusal(prefix: str) -> str:
        answer = made.cli(command, prefix)
        assert (answer.code, answer.out) == (2, "")
        return answer.err

    (run,) = made.cli("runs", "--json").json["runs"]
    rows = run["stages"][1]["outputs"]["rows"]
    assert "no run starts with ffffffff" in refusal("ffffffff")
    assert "too short" in refusal("abc")
    assert f"{rows} is no run but a rows" in refusal(rows[:10])
    with sqlite3.connect(made.root / FILE) as connection:
        for number in "12":
            connection.execute(
                "insert into runs select ?, seq + ?, name, kind, status, manifest_digest, "
                "manifest_path, manifest_text, resolved, overrides, environment, started_at, "
                "ended_at, host, pid from runs where id = ?",
                (f"eeeeeeee{number}", int(number), run["id"]),
            )
    connection.close()
    assert "eeee is the start of 2 hashes: eeeeeeee1 (run), eeeeeeee2 (run)" in refusal("eeee")
    if command != "cancel":
        assert "eeeeeeee2" in made.cli(command, "latest").out + made.cli(command, "latest").err
    empty = made.folder / "empty"
    made.plan(root=empty)
    answer = made.cli(command, "latest", root=empty)
    assert answer.code == 2
    assert "there is no run yet" in answer.err


# runs and its filters


@pytest.fixture(scope="module")
def several(
    first_run: tuple[Project, Answer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, list[str]]:
    """A project with three runs, oldest first: all stages made; all reused; the head alone, under
    another name and long ago."""
    project = first_run[0].copy(tmp_path_factory.mktemp("several") / "project")
    ids = [str(first_run[1].json["run_id"]), str(project.submit().json["run_id"])]
    project.write(HEAD.replace("name: head", "name: other-one"))
    ids.append(str(project.submit().json["run_id"]))
    change(project, ids[2], started_at="2020-02-02T10:00:00.000000Z")
    return project, ids


def listed(project: Project, *filters: str) -> list[str]:
    answer = project.cli("runs", "--json", *filters)
    assert answer.code == 0, answer.err
    return [run["id"] for run in reversed(answer.json["runs"])]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--since", "1h"], [0, 1]),
        (["--since", "2020-02-02"], [0, 1, 2]),
        (["--since", "2020-02-03"], [0, 1]),
        (["--since", "2020-02-02T11:00+02:00"], [0, 1, 2]),
        (["--since", "2020-02-02T10:00:01"], [0, 1]),
        (["--stage", "prepare"], [0, 1]),
        (["--stage", "head"], [0, 1, 2]),
        (["--stage", "rows"], [0, 1]),
        (["--stage", "row"], []),
        (["--status", "done"], [0, 1, 2]),
        (["--status", "failed"], []),
        (["--status", "lost"], []),
        (["--name", "light"], [0, 1]),
        (["--name", "other*"], [2]),
        (["--name", "ligh"], []),
        (["--stage", "head", "--name", "o*", "--since", "2019-01-01"], [2]),
        (["--limit", "1", "--stage", "rows"], [1]),
    ],
)
def test_runs_are_filtered(
    several: tuple[Project, list[str]], filters: list[str], expected: list[int]
) -> None:
    project, ids = several
    assert listed(project, *filters) == [ids[number] for number in expected]


def test_runs_are_found_by_what_they_made_or_took(several: tuple[Project, list[str]]) -> None:
    project, ids = several
    stages = project.cli("show", ids[0], "--json").json["stages"]
    made = {stage["name"]: next(iter(stage["outputs"].values())) for stage in stages}
    assert listed(project, "--artifact", made["head"][:10]) == ids
    assert listed(project, "--artifact", made["rows"]) == ids[:2]
    chats = digest_bytes(project.chats.read_bytes())
    assert listed(project, "--artifact", chats) == ids[:2]
    # a file of the verifier, taken in with its folder
    config = digest_bytes((project.folder / "verifier" / "config.json").read_bytes())
    assert listed(project, "--artifact", config) == ids
    answer = project.cli("runs", "--artifact", "f" * 12)
    assert (answer.code, answer.err) == (2, f"no artifact starts with {'f' * 12}\n")
    answer = project.cli("runs", "--artifact", ids[0])
    assert answer.code == 2
    assert "is no artifact but a run" in answer.err


def test_a_filter_that_nothing_fits_says_how_many_there_are(
    several: tuple[Project, list[str]], project: Project
) -> None:
    answer = several[0].cli("runs", "--status", "failed")
    assert (answer.code, answer.out, answer.err) == (0, "", "none of 3 runs is as asked for\n")
    project.plan()
    assert "no runs yet" in project.cli("runs", "--status", "failed").err


@pytest.mark.parametrize("text", ["yesterday", "2d3", "-1d", "2026-13-01", "99999999999w", ""])
def test_a_time_that_is_none_is_refused(project: Project, text: str) -> None:
    answer = project.cli("runs", f"--since={text}")
    assert answer.code == 2
    assert "is no time: give a date (2026-12-01)" in answer.err


def test_ages_are_counted_back_from_now() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert since("30m", now) == "2026-03-01T11:30:00.000000Z"
    assert since("2d", now) == "2026-02-27T12:00:00.000000Z"
    assert since("1w", now) == "2026-02-22T12:00:00.000000Z"


# show


def test_show_tells_what_a_stage_took_and_its_key(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    run = project.cli("show", answer.json["run_id"], "--json").json
    rows = run["stages"][1]
    assert rows["resources"]["cpu_seconds"] > 0
    assert rows["resources"]["peak_memory_bytes"] > 1 << 20
    artifact = project.cli("show", rows["outputs"]["rows"], "--json").json
    assert rows["resources"]["bytes_written"] == artifact["bytes"]
    assert artifact["verified_at"] is None
    assert artifact["pinned"] is None
    text = project.cli("show", rows["outputs"]["rows"]).out
    assert f"key {rows['key']}" in text
    assert f"peak memory {rows['resources']['peak_memory_bytes']}" in text
    assert "never verified" in text
    assert str(rows["resources"]["peak_memory_bytes"]) in project.cli("show", run["id"]).out


def test_show_tells_of_a_pin_and_of_a_verification(
    made: Project, first_run: tuple[Project, Answer]
) -> None:
    digest = first_run[1].outputs["head"]["head"]
    with sqlite3.connect(made.root / FILE) as connection:
        connection.execute(
            "insert into pins values (?, 'the \x1b[31mgood', '2026-01-01T00:00:00Z')", (digest,)
        )
        connection.execute(
            "update artifacts set verified_at = '2026-02-02T00:00:00Z' where digest = ?", (digest,)
        )
    connection.close()
    found = made.cli("show", digest, "--json").json
    assert found["pinned"] == {"since": "2026-01-01T00:00:00Z", "note": "the \x1b[31mgood"}
    assert found["verified_at"] == "2026-02-02T00:00:00Z"
    assert "verified 2026-02-02" in made.cli("show", digest).out


def test_show_knows_everything_that_has_a_hash(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    run_id, stages = answer.json["run_id"], answer.json["stages"]

    def show(digest: str) -> Any:
        found = project.cli("show", digest, "--json")
        assert found.code == 0, found.err
        assert project.cli("show", digest[:12]).code == 0
        return found.json

    key = show(stages[1]["key"][:12])
    assert (key["type"], key["digest"]) == ("stage key", stages[1]["key"])
    assert [(stage["run"], stage["outputs"]) for stage in key["stages"]] == [
        (run_id, stages[1]["outputs"])
    ]
    assert key["document"]["kind"] == "prepare"
    run = project.cli("show", run_id, "--json").json
    assert [item["id"] for item in show(run["manifest_digest"])["runs"]] == [run_id]
    assert show(digest_bytes(project.chats.read_bytes()))["kind"] == "source"
    config = digest_bytes((project.folder / "verifier" / "config.json").read_bytes())
    assert show(config)["kind"] == "file"
    (verifier,) = show(stages[0]["key"])["document"]["inputs"]["verifier"]
    assert show(verifier)["kind"] == "verifier"
    head = stages[0]["outputs"]["head"]
    part = show(head)["files"]["model.safetensors"]["digest"]
    assert show(part)["holders"] == [{"artifact": head, "path": "model.safetensors"}]


# The public cases


@pytest.mark.parametrize(
    ("name", "where", "found"),
    [
        ("m06_typo", "2:1: run_name: unknown key", "'base'"),
        ("m18_tab", "7:1: vocab: indented with a tab", "'\\tx: {draft_vocab_size: 16}'"),
        ("m18_multidoc", "10:1: a second document", "'---'"),
    ],
)
def test_a_wrong_manifest_is_told_with_file_line_path_and_value(
    project: Project, name: str, where: str, found: str
) -> None:
    # CLI-03
    path: Path = case_input(f"manifests/{name}.yaml")
    answer = project.cli("submit", str(path))
    assert answer.code == 2
    (line,) = [line for line in answer.err.splitlines() if line.startswith(f"{path}:{where}")]
    assert f"(found {found})" in line
    assert not project.root.exists()


@pytest.mark.parametrize("path", ["nowhere", "moonshotai/Kimi-K2.5"])
def test_a_verifier_that_is_not_there_is_told_in_one_line_by_a_detached_submit_too(
    head_project: Project, path: str
) -> None:
    # CLI-04
    head_project.write(HEAD.replace("{path: verifier}", f"{{path: {path}}}"))
    answer = said(head_project.start("submit", str(head_project.manifest), "--detach"))
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert line.startswith(f"{head_project.manifest}:3:18: verifier.path: ")
    assert not head_project.root.exists()
