"""Documented outputs: every command that has --json has a schema, and prints what it says.

Whatever any test has a command print is held against it too (see `outputs.check`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import kimi_eagle
from conftest import MANIFESTS, Answer, Project
from outputs import check, name_of, validator

from kimi_eagle.cli import build_parser
from kimi_eagle.outputs.catalog import OUTPUTS, schema_of


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[str]:
    """Every command that has --json."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, f"{path} {name}".strip())
        elif "--json" in action.option_strings:
            yield path


def test_every_command_with_json_has_a_schema() -> None:
    assert {*commands(build_parser())} == {*OUTPUTS} - {"error"}


@pytest.mark.parametrize("command", OUTPUTS)
def test_users_can_see_the_schema(project: Project, command: str) -> None:
    answer = project.cli("schema", "--output", command)
    assert answer.code == 0
    found = json.loads(answer.out)
    validator(command).check_schema(found)
    assert found == schema_of(command)
    wanted = "a refusal" if command == "error" else f"kimi-eagle {command} --json"
    assert found["title"] == wanted


def test_what_has_no_schema_is_told(project: Project) -> None:
    answer = project.cli("schema", "--output", "logs")
    assert answer.code == 2
    assert "'logs' prints no such document" in answer.err


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("run_id"),
        lambda found: found.update(status="fine"),
        lambda found: found.update(more=1),
        lambda found: found["stages"][0].update(key="short"),
        lambda found: found["stages"][0].update(seconds="1"),
        lambda found: found["stages"][0]["outputs"].update(more=None),
    ],
)
def test_a_document_of_another_shape_is_seen(
    first_run: tuple[Project, Answer], change: Any
) -> None:
    document = first_run[1].json
    check(["submit", "--json"], 0, json.dumps(document))
    change(document)
    with pytest.raises(AssertionError, match="does not print what its schema says"):
        check(["submit", "--json"], 0, json.dumps(document))


def test_a_refusal_has_a_schema_of_its_own(project: Project) -> None:
    project.write("version: 1\n")
    found = project.cli("plan", str(project.manifest), "--json").json
    assert found["problems"]
    assert not validator("error").is_valid({**found, "problems": [{"path": []}]})
    assert not validator("plan").is_valid(found)


def test_lines_are_told_apart() -> None:
    assert name_of(["--color", "never", "registry", "check", "--json"]) == "registry check"
    assert name_of(["show", "abcd", "--json"]) == "show"
    with pytest.raises(AssertionError):
        name_of(["logs", "latest"])


def test_every_kind_of_thing_is_shown_as_its_schema_says(extracted: Project) -> None:
    """`Project.cli` checks each."""
    answer = extracted.submit()
    rows, states = answer.outputs["rows"]["rows"], answer.outputs["states"]["states"]
    shown = extracted.cli("show", rows, "--json").json
    run = extracted.cli("show", answer.json["run_id"], "--json").json
    part = next(iter(shown["files"].values()))["digest"]
    shard = next((extracted.root / "states").rglob("*.safetensors")).stem
    row = next(iter(extracted.states_of(answer)))
    of = [run["manifest_digest"], run["stages"][0]["key"], part, shard, row, states]
    found = [extracted.cli("show", digest, "--json").json["type"] for digest in of]
    assert found == [
        "manifest",
        "stage key",
        "file of an artifact",
        "shard",
        "row",
        "artifact",
    ]
    assert extracted.cli("show", rows, "--row", "0", "--json").json["type"] == "row"
    assert len(extracted.cli("show", rows, "--sample", "3", "--json").json) == 3


@pytest.mark.slow
def test_trainings_and_acceptance_are_told_as_their_schemas_say(
    store: Path, demo: dict[str, dict[str, Any]]
) -> None:
    """`command.kimi_eagle` checks each."""
    draft = demo["draft"]["outputs"]["checkpoint"]
    score = demo["score"]["outputs"]["evaluation"]
    assert kimi_eagle(store, "show", "latest", "--plot")["trainings"][0]["curves"]
    assert kimi_eagle(store, "rank", "latest")["trials"][0]["checkpoint"] == draft
    assert kimi_eagle(store, "compare", draft)["lines"]
    manifest = str(MANIFESTS / "demo.yaml")
    assert {stage["action"] for stage in kimi_eagle(store, "plan", manifest)["stages"]} == {"reuse"}
    kimi_eagle(store, "why", manifest, "--set", "stages.draft.lr=1e-3")
    for command in (["diff", draft, score], ["verify", draft], ["lineage", draft], ["gc"]):
        kimi_eagle(store, *command)
