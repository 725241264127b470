"""A run as OpenLineage 2-0-2 events. Pure.

{"eventType": "START", "eventTime": "…", "run": {"runId": "…", "facets": {"parent": …}},
 "job": {"namespace": "kimi-eagle", "name": "kimi-demo.rows", …}, "inputs": […], …}
{"eventType": "COMPLETE", …, "outputs": [{"name": "kimi-demo/rows/rows", "facets":
 {"version": {"datasetVersion": "<digest>", …}, …}, …}], …}

The run is the parent of its stages. A stage that a run took from an earlier one starts and
completes in the same moment, and says so in `kimiEagle_stage`. Ids are made from the registry's,
so that exporting a run twice gives the same events.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle import __version__
from kimi_eagle.identity import short
from kimi_eagle.records import ArtifactRecord, ExecutionRecord, RunRecord

NAMESPACE = "kimi-eagle"
PREFIX = "kimiEagle"
PRODUCER = f"pkg:pypi/kimi-eagle@{__version__}"

_SPEC = "https://openlineage.io/spec"
_EVENT = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
# The version of each facet's own schema.
_FACETS = {
    "ParentRunFacet": "1-0-1",
    "ErrorMessageRunFacet": "1-0-1",
    "ProcessingEngineRunFacet": "1-1-1",
    "JobTypeJobFacet": "2-0-3",
    "SourceCodeLocationJobFacet": "1-0-1",
    "DatasetVersionDatasetFacet": "1-0-1",
    "DatasetTypeDatasetFacet": "1-0-0",
    "OutputStatisticsOutputDatasetFacet": "1-0-2",
}
SCHEMA = "urn:kimi-eagle:openlineage-facets:1"
"""The `$id` of the schema of our own facets: `openlineage.schema.json` in this package."""

# Artifacts that hold weights; all others hold data.
_MODELS = frozenset({"verifier", "head", "checkpoint", "release"})
_ENDS = {
    "executed": "COMPLETE",
    "reused": "COMPLETE",
    "reproduced": "COMPLETE",
    "done": "COMPLETE",
    "failed": "FAIL",
    "interrupted": "ABORT",
}
_IDS = uuid.uuid5(uuid.NAMESPACE_URL, "urn:kimi-eagle")


@dataclass(frozen=True)
class RunHistory:
    """What the registry holds of a run."""

    run: RunRecord
    environment: Mapping[str, Any]
    stages: Sequence[ExecutionRecord]
    artifacts: Mapping[str, ArtifactRecord]
    """By digest, all that its stages took in and made."""
    made_by: Mapping[int, str]
    """Of executions whose outputs were taken from an earlier run: that run's id."""


def events(history: RunHistory, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """The events of a run and its stages, by time; what has not ended has no ending event."""
    return list(_Export(history, namespace).events())


class _Export:
    def __init__(self, history: RunHistory, namespace: str):
        self._history = history
        self._namespace = namespace
        self._names = _dataset_names(history)

    def events(self) -> Iterator[dict[str, Any]]:
        run = self._history.run
        told = [self._run_event("START", run.started_at)]
        for stage in self._history.stages:
            told.append(self._stage_event("START", stage.started_at, stage))
            if stage.disposition in _ENDS and stage.ended_at is not None:
                told.append(self._stage_event(_ENDS[stage.disposition], stage.ended_at, stage))
        if run.status in _ENDS and run.ended_at is not None:
            told.append(self._run_event(_ENDS[run.status], run.ended_at))
        # Times have one form, so that as text they sort as times do; equal ones keep their order.
        yield from sorted(told, key=lambda event: str(event["eventTime"]))

    def _run_event(self, kind: str, time: str) -> dict[str, Any]:
        run = self._history.run
        facets: dict[str, Any] = {
            "processing_engine": self._engine(self._history.environment),
            f"{PREFIX}_run": _own(
                "RunFacet",
                runId=run.id,
                runKind=run.kind,
                status=run.status,
                manifestDigest=run.manifest_digest,
                host=run.host,
            ),
        }
        failed = [stage for stage in self._history.stages if stage.error]
        if kind == "FAIL":
            facets["errorMessage"] = _error(
                "; ".join(f"{stage.stage}: {stage.error}" for stage in failed) or "the run failed"
            )
        return self._event(kind, time, _run_id(run.id), facets, self._run_job(), [], [])

    def _stage_event(self, kind: str, time: str, stage: ExecutionRecord) -> dict[str, Any]:
        run = self._history.run
        job = self._run_job()
        parent = {
            "run": {"runId": _run_id(run.id)},
            "job": {"namespace": job["namespace"], "name": job["name"]},
        }
        own: dict[str, Any] = {
            "runId": run.id,
            "stage": stage.stage,
            "stageKind": stage.kind,
            "stageKey": stage.key,
            "disposition": stage.disposition,
        }
        if kind != "START":
            own["metrics"] = dict(stage.metrics)
            own["resources"] = {"seconds": stage.seconds, **stage.resources}
        if stage.id in self._history.made_by:
            own["madeByRun"] = self._history.made_by[stage.id]
        facets = {
            "parent": _facet("ParentRunFacet", **parent),
            "processing_engine": self._engine(stage.environment),
            f"{PREFIX}_stage": _own("StageFacet", **own),
        }
        if kind == "FAIL":
            facets["errorMessage"] = _error(stage.error or "the stage failed")
        inputs = (stage.document or {}).get("inputs", {})
        return self._event(
            kind,
            time,
            _run_id(f"{run.id}/{stage.id}"),
            facets,
            self._stage_job(stage),
            [self._dataset(digest) for digest in _once(inputs.values())],
            [self._output(digest, stage) for digest in stage.outputs.values()]
            if kind == "COMPLETE"
            else [],
        )

    def _event(
        self,
        kind: str,
        time: str,
        run_id: str,
        facets: Mapping[str, Any],
        job: Mapping[str, Any],
        inputs: Sequence[Mapping[str, Any]],
        outputs: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        return {
            "eventType": kind,
            "eventTime": time,
            "run": {"runId": run_id, "facets": dict(facets)},
            "job": dict(job),
            "inputs": list(inputs),
            "outputs": list(outputs),
            "producer": PRODUCER,
            "schemaURL": _EVENT,
        }

    def _engine(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        return _facet(
            "ProcessingEngineRunFacet",
            name="kimi-eagle",
            version=str(environment.get("kimi_eagle", __version__)),
        )

    def _run_job(self) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "name": self._history.run.name,
            "facets": {"jobType": _job_type("RUN")},
        }

    def _stage_job(self, stage: ExecutionRecord) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "name": f"{self._history.run.name}.{stage.stage}",
            "facets": {
                "jobType": _job_type("STAGE"),
                "sourceCodeLocation": _source_code(stage),
            },
        }

    def _dataset(self, digest: str) -> dict[str, Any]:
        record = self._history.artifacts.get(digest)
        kind = record.kind if record else "artifact"
        own: dict[str, Any] = {"digest": digest, "artifactKind": kind}
        if record is not None:
            own |= {"state": record.state, "bytes": record.bytes}
        return {
            "namespace": self._namespace,
            "name": self._names[digest],
            "facets": {
                "version": _facet("DatasetVersionDatasetFacet", datasetVersion=digest),
                "datasetType": _facet(
                    "DatasetTypeDatasetFacet",
                    datasetType="MODEL" if kind in _MODELS else "FILE",
                    subType=kind,
                ),
                f"{PREFIX}_artifact": _own("ArtifactFacet", **own),
            },
        }

    def _output(self, digest: str, stage: ExecutionRecord) -> dict[str, Any]:
        dataset = self._dataset(digest)
        record = self._history.artifacts.get(digest)
        if record is not None and stage.reused_from is None:
            rows = stage.metrics.get("rows")
            statistics = {"size": record.bytes, "fileCount": len(record.files)}
            if isinstance(rows, int):
                statistics["rowCount"] = rows
            dataset["outputFacets"] = {
                "outputStatistics": _facet("OutputStatisticsOutputDatasetFacet", **statistics)
            }
        return dataset


def _dataset_names(history: RunHistory) -> dict[str, str]:
    """A name for each artifact, which stays while its digest, the version, changes.

    What a stage made is `<manifest>/<stage>/<role>`; what comes from outside goes by its kind and
    file name, and where several have one name, by the start of the digest too.
    """
    names: dict[str, str] = {}
    for stage in history.stages:
        for role, digest in stage.outputs.items():
            names.setdefault(digest, f"{history.run.name}/{stage.stage}/{role}")
    taken: dict[str, int] = {}
    outside: dict[str, str] = {}
    for stage in history.stages:
        for digest in _once((stage.document or {}).get("inputs", {}).values()):
            if digest in names or digest in outside:
                continue
            record = history.artifacts.get(digest)
            kind, label = (record.kind, record.label) if record else ("artifact", "")
            outside[digest] = f"{kind}/{label or short(digest)}"
            taken[outside[digest]] = taken.get(outside[digest], 0) + 1
    for digest, name in outside.items():
        names[digest] = name if taken[name] == 1 else f"{name}@{short(digest)}"
    return names


def _once(groups: Any) -> list[str]:
    return list(dict.fromkeys(digest for group in groups for digest in group))


def _run_id(name: str) -> str:
    return str(uuid.uuid5(_IDS, name))


def _facet(name: str, /, **values: Any) -> dict[str, Any]:
    url = f"{_SPEC}/facets/{_FACETS[name]}/{name}.json#/$defs/{name}"
    return {"_producer": PRODUCER, "_schemaURL": url, **values}


def _own(name: str, /, **values: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": f"{SCHEMA}#/$defs/{name}", **values}


def _error(message: str) -> dict[str, Any]:
    return _facet("ErrorMessageRunFacet", message=message, programmingLanguage="Python")


def _job_type(kind: str) -> dict[str, Any]:
    return _facet("JobTypeJobFacet", processingType="BATCH", integration="KIMI_EAGLE", jobType=kind)


def _source_code(stage: ExecutionRecord) -> dict[str, Any]:
    """Where the stage's code is: in a commit, or in a released package."""
    version = str(stage.environment.get("kimi_eagle", __version__))
    path = f"kimi_eagle/stages/{stage.kind}/run.py"
    code = stage.environment.get("code")
    url = f"pkg:pypi/kimi-eagle@{version}#{path}"
    if not code:
        return _facet(
            "SourceCodeLocationJobFacet", type="pypi", url=url, path=path, version=version
        )
    # A commit with changes on top is no version that anybody could look up.
    commit = f"{code['commit']}+{short(code['diff'])}" if code.get("dirty") else code["commit"]
    return _facet("SourceCodeLocationJobFacet", type="git", url=url, path=path, version=commit)
