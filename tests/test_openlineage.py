"""The OpenLineage export: what its events say, and that others can read them."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import pytest
from conftest import HEAD, Answer, Project

from kimi_eagle.identity import digest_bytes
from kimi_eagle.openlineage import SCHEMA, RunHistory, events
from kimi_eagle.records import ArtifactRecord, ExecutionRecord, RunRecord

Event = dict[str, Any]


def export(project: Project, run: str = "latest", *arguments: str) -> list[Event]:
    answer = project.cli("openlineage", run, *arguments)
    assert answer.code == 0, answer.err
    return [json.loads(line) for line in answer.out.splitlines()]


@pytest.fixture(scope="module")
def exported(first_run: tuple[Project, Answer]) -> list[Event]:
    return export(first_run[0])


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], str]:
    """The events of a run whose only stage failed, and its error."""
    from conftest import new_project

    project = new_project(tmp_path_factory.mktemp("failed") / "project", HEAD)
    index = project.folder / "verifier" / "model.safetensors.index.json"
    index.write_text(index.read_text("utf-8").replace("lm_head", "lm_haed"), "utf-8")
    answer = project.submit()
    assert answer.code == 1
    return export(project), str(answer.json["stages"][0]["error"])


def of(found: list[Event], job: str, kind: str) -> Event:
    (event,) = [item for item in found if item["job"]["name"] == job and item["eventType"] == kind]
    return event


def own(event: Event) -> Mapping[str, Any]:
    return dict(event["run"]["facets"]["kimiEagle_stage"])


# What the events say


def test_a_run_and_each_of_its_stages_start_and_complete(exported: list[Event]) -> None:
    told = [(event["job"]["name"], event["eventType"]) for event in exported]
    assert told == [
        ("light", "START"),
        *(
            (f"light.{stage}", kind)
            for stage in ("head", "rows", "vocab")
            for kind in ("START", "COMPLETE")
        ),
        ("light", "COMPLETE"),
    ]
    times = [event["eventTime"] for event in exported]
    assert times == sorted(times)
    assert len({event["run"]["runId"] for event in exported}) == 4, "an id for each, start and end"


def test_stages_name_the_run_as_their_parent(exported: list[Event]) -> None:
    run = exported[0]
    for event in exported[1:-1]:
        parent = event["run"]["facets"]["parent"]
        assert parent["run"] == {"runId": run["run"]["runId"]}
        assert parent["job"] == {"namespace": "kimi-eagle", "name": "light"}
    assert "parent" not in run["run"]["facets"]


def test_datasets_lead_from_the_sources_to_what_came_of_them(
    first_run: tuple[Project, Answer], exported: list[Event]
) -> None:
    project, answer = first_run
    rows, vocab = (of(exported, f"light.{name}", "COMPLETE") for name in ("rows", "vocab"))
    (made,) = rows["outputs"]
    assert made["name"] == "light/rows/rows"
    assert made["facets"]["version"]["datasetVersion"] == answer.outputs["rows"]["rows"]
    assert made["facets"]["datasetType"]["datasetType"] == "FILE"
    (taken,) = [item for item in vocab["inputs"] if item["name"] == made["name"]]
    assert {key: taken[key] for key in ("namespace", "name", "facets")} == {
        key: made[key] for key in ("namespace", "name", "facets")
    }
    inputs = {item["name"]: item for item in rows["inputs"]}
    assert set(inputs) == {"source/chats.jsonl", "tokenizer/verifier"}
    version = inputs["source/chats.jsonl"]["facets"]["version"]["datasetVersion"]
    assert version == digest_bytes(project.chats.read_bytes())
    head = of(exported, "light.head", "COMPLETE")
    assert [item["facets"]["datasetType"]["datasetType"] for item in head["inputs"]] == ["MODEL"]


def test_what_was_written_is_counted(
    first_run: tuple[Project, Answer], exported: list[Event]
) -> None:
    (rows,) = of(exported, "light.rows", "COMPLETE")["outputs"]
    statistics = rows["outputFacets"]["outputStatistics"]
    artifact = first_run[0].cli("show", first_run[1].outputs["rows"]["rows"], "--json").json
    assert statistics["size"] == artifact["bytes"]
    assert statistics["fileCount"] == len(artifact["files"])
    assert statistics["rowCount"] == 10
    assert of(exported, "light.rows", "START")["outputs"] == []


def test_the_code_of_a_stage_is_named_with_its_version(exported: list[Event]) -> None:
    location = of(exported, "light.vocab", "START")["job"]["facets"]["sourceCodeLocation"]
    assert location["path"] == "kimi_eagle/stages/vocab/run.py"
    assert location["url"].endswith("#kimi_eagle/stages/vocab/run.py")
    assert location["version"]


def test_a_failed_stage_fails_with_its_error_and_so_does_its_run(
    failed: tuple[list[Event], str],
) -> None:
    found, error = failed
    stage, run = of(found, "head.head", "FAIL"), of(found, "head", "FAIL")
    assert stage["run"]["facets"]["errorMessage"]["message"] == error
    assert run["run"]["facets"]["errorMessage"]["message"] == f"head: {error}"
    assert stage["outputs"] == []
    assert not [event for event in found if event["eventType"] == "COMPLETE"]


def test_a_reused_stage_says_who_made_it_and_claims_no_writing(made: Project) -> None:
    first = made.cli("runs", "--json").json["runs"][0]["id"]
    again = made.submit()
    rows = of(export(made), "light.rows", "COMPLETE")
    assert own(rows)["disposition"] == "reused"
    assert own(rows)["madeByRun"] == first
    (output,) = rows["outputs"]
    assert output["facets"]["version"]["datasetVersion"] == again.outputs["rows"]["rows"]
    assert "outputFacets" not in output


def test_exporting_twice_gives_the_same_events(
    first_run: tuple[Project, Answer], exported: list[Event], tmp_path: Path
) -> None:
    project, answer = first_run
    file = tmp_path / "events.ndjson"
    written = project.cli("openlineage", answer.json["run_id"], "-o", str(file))
    assert (written.code, written.out) == (0, "")
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == exported
    elsewhere = export(project, "latest", "--namespace", "team")
    assert {event["job"]["namespace"] for event in elsewhere} == {"team"}


def test_a_file_that_cannot_be_written_is_refused(
    first_run: tuple[Project, Answer], tmp_path: Path
) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "file"):
        answer = first_run[0].cli("openlineage", "latest", "-o", str(place))
        assert answer.code == 2
        assert "Traceback" not in answer.err


# Histories that are hard to bring about

STAGE = ExecutionRecord(
    id=1,
    run_id="aaaabbbb",
    stage="rows",
    kind="prepare",
    key="e" * 64,
    document={"inputs": {"sources.0": ["1" * 64], "sources.1": ["2" * 64]}},
    disposition="running",
    reused_from=None,
    metrics={},
    resources={},
    environment={
        "kimi_eagle": "0.1.0",
        "code": {"commit": "c" * 40, "dirty": True, "diff": "d" * 64},
    },
    error=None,
    seconds=None,
    started_at="2026-12-01T00:00:01.000000Z",
    ended_at=None,
    outputs={},
)


def history(status: str, disposition: str) -> list[Event]:
    ended = None if status in ("running", "lost") else "2026-12-01T00:00:09.000000Z"
    run = RunRecord(
        id="aaaabbbb",
        name="m",
        kind="submit",
        status=status,
        manifest_digest="a" * 64,
        manifest_path="m.yaml",
        started_at="2026-12-01T00:00:00.000000Z",
        ended_at=ended,
        host="h",
        pid=1,
    )
    fields = {**vars(STAGE), "disposition": disposition, "ended_at": ended}
    sources = [
        ArtifactRecord(number * 64, "source", 1, {}, "external", "chats.jsonl") for number in "12"
    ]
    known = {record.digest: record for record in sources}
    return events(RunHistory(run, {}, [ExecutionRecord(**fields)], known, {}))


def test_an_interrupted_run_is_aborted() -> None:
    found = history("interrupted", "interrupted")
    assert [event["eventType"] for event in found] == ["START", "START", "ABORT", "ABORT"]


@pytest.mark.parametrize("status", ["running", "lost"])
def test_what_has_no_end_has_no_ending_event(status: str) -> None:
    found = history(status, status)
    assert [event["eventType"] for event in found] == ["START", "START"]
    validated(found)


def test_files_of_one_name_are_told_apart() -> None:
    names = [item["name"] for item in history("done", "executed")[1]["inputs"]]
    assert names == [f"source/chats.jsonl@{number * 12}" for number in "12"]


def test_uncommitted_changes_are_part_of_the_version() -> None:
    location = history("done", "executed")[1]["job"]["facets"]["sourceCodeLocation"]
    assert (location["type"], location["version"]) == ("git", f"{'c' * 40}+{'d' * 12}")


# What others require of them


def validated(found: list[Event]) -> int:
    """Check our own facets against their schema; how many there were."""
    schema = json.loads((files("kimi_eagle") / "openlineage.schema.json").read_text("utf-8"))
    assert schema["$id"] == SCHEMA
    jsonschema.Draft202012Validator.check_schema(schema)
    count = 0
    for event in found:
        datasets = [*event["inputs"], *event["outputs"]]
        for facets in (event["run"]["facets"], *(item["facets"] for item in datasets)):
            for name, facet in facets.items():
                if name.startswith("kimiEagle_"):
                    base, pointer = facet["_schemaURL"].split("#")
                    assert base == SCHEMA
                    reference = {"$ref": f"#{pointer}", "$defs": schema["$defs"]}
                    jsonschema.Draft202012Validator(reference).validate(facet)
                    count += 1
    return count


def test_our_own_facets_keep_to_their_schema(
    exported: list[Event], failed: tuple[list[Event], str], made: Project
) -> None:
    made.submit()
    assert validated(exported) > 8
    assert validated(failed[0]) >= 4
    assert validated(export(made)) > 8
    broken = json.loads(json.dumps(exported))
    broken[1]["run"]["facets"]["kimiEagle_stage"]["stageKey"] = "short"
    with pytest.raises(jsonschema.ValidationError):
        validated(broken)


def structured(value: Any, kind: Any, facets: Mapping[str, Any]) -> Any:
    """A JSON value as one of the types of `openlineage-python`; a property that a type lacks, or
    a value of another type, is an error."""
    import attr

    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        kinds = [item for item in typing.get_args(kind) if item is not type(None)]
        return None if value is None else structured(value, kinds[0], facets)
    if origin is list:
        assert type(value) is list
        return [structured(item, typing.get_args(kind)[0], facets) for item in value]
    if origin is dict:
        default = typing.get_args(kind)[1]
        return {
            name: structured(item, facets[name], facets)
            if name in facets
            else extended(item, default)
            for name, item in value.items()
        }
    if not attr.has(kind):
        return kind(value) if hasattr(kind, "__members__") else exactly(value, kind)
    attr.resolve_types(kind)
    fields = {field.name: field for field in attr.fields(kind)}
    given = {
        fields[name].alias: structured(item, fields[name].type, facets)
        for name, item in value.items()
        if fields[name].init
    }
    return kind(**given)


def exactly(value: Any, kind: Any) -> Any:
    assert type(value) is kind, f"{value!r} is no {kind}"
    return value


def extended(value: Mapping[str, Any], kind: Any) -> Any:
    """A facet of our own: what every facet has, and more."""
    assert {"_producer", "_schemaURL"} <= set(value)
    more = {name: item for name, item in value.items() if not name.startswith("_")}
    return kind(producer=value["_producer"]).with_additional_properties(**more)


def test_the_events_are_those_of_the_published_types(
    exported: list[Event], failed: tuple[list[Event], str], made: Project
) -> None:
    pytest.importorskip("openlineage.client", reason="openlineage-python is not installed")
    from openlineage.client import event_v2, facet_v2
    from openlineage.client.generated import output_statistics_output_dataset as statistics
    from openlineage.client.serde import Serde

    known = {
        "parent": facet_v2.parent_run.ParentRunFacet,
        "errorMessage": facet_v2.error_message_run.ErrorMessageRunFacet,
        "processing_engine": facet_v2.processing_engine_run.ProcessingEngineRunFacet,
        "jobType": facet_v2.job_type_job.JobTypeJobFacet,
        "sourceCodeLocation": facet_v2.source_code_location_job.SourceCodeLocationJobFacet,
        "version": facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet,
        "datasetType": facet_v2.dataset_type_dataset.DatasetTypeDatasetFacet,
        "outputStatistics": statistics.OutputStatisticsOutputDatasetFacet,
    }
    made.submit()
    used = set()
    for event in [*exported, *failed[0], *export(made)]:
        read = structured(event, event_v2.RunEvent, known)
        assert shape(Serde.to_dict(read)) == shape(event)
        assert event["schemaURL"] == read.schemaURL
        UUID(event["run"]["runId"])
        used |= set(re.findall(r'"(\w+)": \{"_producer"', json.dumps(event)))
    assert set(known) < used, "each of them is in some event"


def shape(value: Any) -> Any:
    """A value without what its reader fills in: empty parts, and the versions of schemas."""
    if isinstance(value, dict):
        return {
            name: shape(item)
            for name, item in value.items()
            if item not in ({}, [], None) and name != "_schemaURL"
        }
    return [shape(item) for item in value] if isinstance(value, list) else value


def test_the_schemas_of_facets_are_named_as_they_are_published(exported: list[Event]) -> None:
    urls = set(re.findall(r'"_schemaURL": "([^"]+)"', json.dumps(exported)))
    for url in urls:
        published = re.fullmatch(
            r"https://openlineage\.io/spec/facets/\d+-\d+-\d+/(\w+)\.json#/\$defs/(\w+)", url
        )
        assert url.startswith(f"{SCHEMA}#/$defs/") or (published and published[1] == published[2])
    assert len(urls) > 8
