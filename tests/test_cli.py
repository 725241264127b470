"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import ctypes
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
from conftest import Answer, Project

from kimi_eagle.cli import build_parser
from kimi_eagle.registry.schema import FILE

COMMANDS = (
    "init",
    "validate",
    "plan",
    "why",
    "submit",
    "runs",
    "show",
    "rank",
    "logs",
    "attach",
    "cancel",
    "lineage",
    "diff",
    "compare",
    "openlineage",
    "ui",
    "report",
    "reproduce",
    "record",
    "verify",
    "check-rows",
    "gc",
    "push",
    "pull",
    "pin",
    "unpin",
    "registry",
    "doctor",
    "completion",
    "schema",
)
DIGEST = 64


@pytest.fixture(scope="module")
def done(first_run: tuple[Project, Answer]) -> Project:
    """A project that ran; only read here."""
    return first_run[0]


@pytest.fixture
def head(first_run: tuple[Project, Answer]) -> str:
    """The digest of an artifact of it."""
    return str(first_run[1].outputs["head"]["head"])


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(project: Project, command: str) -> None:
    answer = project.cli(*command.split(), "--help")
    assert answer.code == 0
    assert answer.out.startswith("usage: kimi-eagle")
    assert answer.err == ""
    if not command:
        assert all(f"    {name} " in answer.out for name in COMMANDS)


def test_the_commands_are_those_tested_here() -> None:
    (commands,) = (item for item in build_parser()._actions if isinstance(item.choices, dict))
    assert tuple(commands.choices) == COMMANDS


@pytest.mark.parametrize("arguments", [[], ["sbmit"], ["submit"], ["runs", "--limit", "x"]])
def test_a_wrong_command_line_is_bad_input(project: Project, arguments: list[str]) -> None:
    answer = project.cli(*arguments)
    assert answer.code == 2
    assert "usage: " in answer.err
    assert answer.out == ""


def test_the_root_comes_from_the_environment_too(
    done: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_EAGLE_ROOT", str(done.root))
    assert build_parser().parse_args(["runs"]).root == done.root
    assert build_parser().parse_args(["--root", "x", "runs"]).root == Path("x")
    monkeypatch.setenv("KIMI_EAGLE_ROOT", "")
    assert build_parser().parse_args(["runs"]).root == Path("runs")


# JSON, as scripts rely on it


def test_submit_ends_with_one_json_object(first_run: tuple[Project, Answer]) -> None:
    _, answer = first_run
    assert len(answer.out.splitlines()) == 1
    found = answer.json
    assert set(found) == {"run_id", "status", "stages"}
    assert found["status"] == "done"
    for stage in found["stages"]:
        assert set(stage) == {"name", "kind", "disposition", "key", "outputs", "metrics", "seconds"}
        assert stage["disposition"] in ("executed", "reused", "failed")
        assert len(stage["key"]) == DIGEST
        assert all(len(digest) == DIGEST for digest in stage["outputs"].values())
        assert stage["seconds"] > 0
    assert "rows: done in" in answer.err


def test_plan_says_of_every_stage_what_and_why(done: Project, project: Project) -> None:
    for stage in project.plan().values():
        assert stage["action"] in ("run", "depends")
        assert stage["reasons"]
    for name, stage in done.plan().items():
        assert {"name", "kind", "action", "key", "reasons", "outputs"} <= set(stage)
        assert stage["action"] == "reuse"
        assert stage["outputs"], name


def test_plan_starts_nothing(project: Project) -> None:
    project.plan()
    assert project.cli("runs", "--json").json == {"runs": []}
    assert not (project.root / "objects").exists()


def test_validate_gives_the_resolved_manifest(done: Project) -> None:
    found = done.cli("validate", str(done.manifest), "--json").json
    assert found["status"] == "valid"
    assert found["verifier_checked"] is True
    assert len(found["digest"]) == DIGEST
    assert found["resolved"]["stages"]["rows"]["thinking"] == "auto"


def test_validate_needs_no_verifier_on_this_machine(project: Project) -> None:
    shutil.rmtree(project.folder / "verifier")
    answer = project.cli("validate", str(project.manifest), "--json")
    assert answer.code == 0
    assert answer.json["verifier_checked"] is False
    assert not project.root.exists()


def test_runs_lists_the_newest_first_with_their_stages(made: Project) -> None:
    made.submit()
    newest, oldest = made.cli("runs", "--json").json["runs"]
    assert newest["started_at"] > oldest["started_at"]
    assert {stage["disposition"] for stage in newest["stages"]} == {"reused"}
    assert {stage["disposition"] for stage in oldest["stages"]} == {"executed"}
    assert made.cli("runs", "--json", "--limit", "1").json["runs"] == [newest]


def test_show_tells_a_run_and_an_artifact(first_run: tuple[Project, Answer], head: str) -> None:
    project, answer = first_run
    run = project.cli("show", answer.json["run_id"][:6], "--json").json
    assert (run["type"], run["id"], run["status"]) == ("run", answer.json["run_id"], "done")
    assert run["manifest"] == project.manifest.read_text("utf-8")
    assert run["resolved"]["name"] == "light"
    assert run["environment"]["packages"]
    artifact = project.cli("show", head[:12], "--json").json
    assert (artifact["type"], artifact["digest"], artifact["kind"]) == ("artifact", head, "head")
    assert artifact["bytes"] == sum(file["bytes"] for file in artifact["files"].values())
    assert artifact["producers"][0]["run"] == answer.json["run_id"]


def test_lineage_leads_from_the_vocabulary_to_the_source_files(
    first_run: tuple[Project, Answer],
) -> None:
    project, answer = first_run
    outputs = answer.outputs
    found = project.cli("lineage", outputs["vocab"]["vocab"], "--json").json
    assert set(found) == {"nodes", "edges"}
    kinds = {node["digest"]: node["kind"] for node in found["nodes"]}
    assert set(kinds.values()) == {"vocab", "rows", "source", "tokenizer", "file"}
    for node in found["nodes"]:
        assert {"digest", "kind", "bytes", "state"} <= set(node)
        assert len(node["digest"]) == DIGEST
    edges = {(kinds[edge["from"]], kinds[edge["to"]], edge["stage"]) for edge in found["edges"]}
    assert {("rows", "vocab", "vocab"), ("source", "rows", "rows")} < edges
    files = {node["label"] for node in found["nodes"] if node["kind"] == "file"}
    assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= files
    down = project.cli("lineage", outputs["rows"]["rows"], "--down", "--json").json
    assert {node["kind"] for node in down["nodes"]} == {"rows", "vocab"}


def test_schema_prints_a_json_schema(project: Project) -> None:
    assert json.loads(project.cli("schema").out)["title"] == "kimi-eagle manifest"


# In a pipe


@pytest.mark.parametrize("command", ["plan", "runs", "submit"])
def test_in_a_pipe_tables_are_tab_separated_without_header_and_hashes_whole(
    made: Project, command: str
) -> None:
    arguments = [] if command == "runs" else [str(made.manifest)]
    rows = [line.split("\t") for line in made.cli(command, *arguments).out.splitlines()]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) > 3
    assert not rows[0][0].isupper()
    if command != "runs":
        assert all(any(len(cell) == DIGEST for cell in row) for row in rows)


def test_in_a_pipe_text_shows_whole_hashes_too(done: Project, head: str) -> None:
    assert head in done.cli("show", head[:8]).out
    assert head in done.cli("lineage", head[:8]).out


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_ends_no_run(made: Project, stream: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    arguments = [sys.executable, "-m", "kimi_eagle", "--root", str(made.root), "submit"]
    done = subprocess.run([*arguments, str(made.manifest)], **pipes)
    os.close(writer)
    assert done.returncode == 0
    assert b"Traceback" not in (done.stderr or b"")
    assert made.cli("runs", "--json").json["runs"][0]["status"] == "done"


# A user's mistakes


def refused(answer: Answer, *parts: str) -> None:
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert len(answer.err.splitlines()) == 1, answer.err
    for part in parts:
        assert part in answer.err


BAD_MANIFESTS: dict[str, Callable[[Path], Any]] = {
    "cannot be read: No such file": lambda path: path.unlink(),
    "cannot be read: Is a directory": lambda path: (path.unlink(), path.mkdir()),
    "not UTF-8 text: byte 0xff": lambda path: path.write_bytes(b"version: 1\nname: \xff\xfe"),
    "character U+0000 is not allowed": lambda path: path.write_bytes(b"\0" * 64),
    "the file holds no document": lambda path: path.write_text(""),
    "the top level must be a mapping": lambda path: path.write_text("- 1\n"),
}


@pytest.mark.parametrize("message", BAD_MANIFESTS)
@pytest.mark.parametrize("command", ["validate", "plan", "submit"])
def test_what_is_no_manifest_is_refused_in_one_line(
    project: Project, command: str, message: str
) -> None:
    BAD_MANIFESTS[message](project.manifest)
    refused(project.cli(command, str(project.manifest)), str(project.manifest), message)
    assert not project.root.exists()


def test_a_bad_manifest_is_told_as_json_too(project: Project) -> None:
    project.write(project.manifest.read_text("utf-8").replace("size:", "sise:"))
    answer = project.cli("submit", str(project.manifest), "--json")
    found = answer.json
    assert answer.code == 2
    assert found["status"] == "error"
    (problem,) = found["problems"]
    assert problem["path"] == ["stages", "vocab", "sise"]
    assert (problem["line"], problem["found"]) == (7, 256)
    assert "did you mean 'size'?" in problem["hint"]


@pytest.mark.parametrize("command", ["show", "lineage"])
def test_an_unknown_and_an_ambiguous_hash_are_told_apart(made: Project, command: str) -> None:
    refused(made.cli(command, "ffffffffffffffff"), "artifact", "starts with fffff")
    refused(made.cli(command, "abc"), "too short")
    with sqlite3.connect(made.root / FILE) as connection:
        for last in "01":
            connection.execute(
                "insert into artifacts values (?, 'rows', 1, '{}', '', 'present', '', null)",
                ("f" * 63 + last,),
            )
    refused(made.cli(command, "ffffffff"), "2 hashes", "give more of it")


def test_a_run_has_no_lineage_of_its_own(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    refused(project.cli("lineage", answer.json["run_id"]), "is a run", "kimi-eagle show")


QUERIES = (["runs"], ["show", "abcdef"], ["lineage", "abcdef"])


@pytest.mark.parametrize("arguments", QUERIES, ids=lambda item: item[0])
def test_queries_make_no_registry(project: Project, arguments: list[str]) -> None:
    refused(project.cli(*arguments), "there is no registry at", "--root")
    assert not project.root.exists()


@pytest.mark.parametrize("arguments", [*QUERIES, ["plan"], ["submit"]], ids=lambda item: item[0])
def test_a_root_that_is_a_file_is_refused(project: Project, arguments: list[str]) -> None:
    project.root.write_text("not a folder")
    more = [str(project.manifest)] if len(arguments) == 1 and arguments[0] != "runs" else []
    refused(project.cli(*arguments, *more), str(project.root))
    refused(project.cli(*arguments, *more, root=project.root / "below"), str(project.root))
    assert project.root.read_text() == "not a folder"


@pytest.mark.parametrize("arguments", [*QUERIES, ["plan"], ["submit"]], ids=lambda item: item[0])
@pytest.mark.parametrize("kind", ["garbage", "newer"])
def test_a_registry_that_cannot_be_used_is_refused_and_left_alone(
    project: Project, arguments: list[str], kind: str
) -> None:
    # REG-08
    project.root.mkdir()
    path = project.root / FILE
    if kind == "garbage":
        path.write_bytes(b"\0garbage" * 1000)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("create table alembic_version (version_num text)")
            connection.execute("insert into alembic_version values ('ffffffffffff')")
        connection.close()
    before = path.read_bytes()
    more = [str(project.manifest)] if len(arguments) == 1 and arguments[0] != "runs" else []
    expected = "newer version" if kind == "newer" else "cannot be read as a registry"
    refused(project.cli(*arguments, *more), str(path), expected)
    assert path.read_bytes() == before
    assert list(project.root.iterdir()) == [path]


def _without_override() -> None:
    """Give up root's right to write where the mode forbids it; others have no such right."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("command", ["submit", "runs"])
def test_a_read_only_root_is_refused_where_it_must_be_written(
    made: Project, command: str, ran_before: bool
) -> None:
    if not ran_before:
        shutil.rmtree(made.root)
        made.root.mkdir()
    arguments = [] if command == "runs" else [str(made.manifest)]
    folders = [made.root, *(path for path in made.root.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    for path in made.root.glob("registry*"):
        path.chmod(0o444)
    process = made.start(command, *arguments, preexec_fn=_without_override)
    out, err = process.communicate()
    for folder in folders:
        folder.chmod(0o755)
    if command == "runs" and ran_before:
        assert (process.returncode, len(out.splitlines())) == (0, 1), err
    else:
        refused(Answer(process.returncode, out, err), str(made.root))


def test_ctrl_c_before_anything_started_is_an_interruption_without_a_traceback(
    project: Project,
) -> None:
    os.mkfifo(project.folder / "pipe.yaml")
    process = project.start("submit", str(project.folder / "pipe.yaml"))
    with (project.folder / "pipe.yaml").open("w"):  # opens when the command reads
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted\n")
