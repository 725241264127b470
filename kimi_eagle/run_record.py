"""A run record: all that it takes to make an artifact again, and to tell whether it came out so.

    {"format": "kimi-eagle.record/1", "target": "3aae8e53…", "kind": "checkpoint", "stage": "draft",
     "run": {"id": "496e9b82db30", …}, "manifest": {…}, "stages": [{"name": "head", …}, …],
     "artifacts": {…}, "tensors": {…}}

It is collected from a registry, or read from the file that `kimi-eagle record` wrote. It holds no
input's content: those who reproduce bring the sources, and their digests are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import inside
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.artifacts.tensors import tensor_digests
from kimi_eagle.identity import digest_document, digest_tree, short
from kimi_eagle.job import EventReader
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.records import ArtifactRecord, ExecutionRecord
from kimi_eagle.registry.search import RUN, Search
from kimi_eagle.registry.store import Registry

_MADE = ("executed", "reused", "reproduced")
_CLOSED = ConfigDict(extra="forbid")


class CannotReproduce(LookupError):
    """Something stands in the way of making an artifact again; the message says what."""


@dataclass(frozen=True, config=_CLOSED)
class LossRecord:
    """What a training logged at one optimizer step, or of one epoch's validation."""

    split: str
    at: int
    """The step, or the epoch, counted from 1."""
    values: dict[str, float | None]


@dataclass(frozen=True, config=_CLOSED)
class StageRecord:
    """How one stage was made."""

    name: str
    kind: str
    run_id: str
    """The run that executed it; an earlier one where it was reused."""
    key: str
    document: dict[str, Any]
    """What `key` is the digest of: kind, code version, parameters, and inputs by role."""
    outputs: dict[str, str]
    metrics: dict[str, Any]
    environment: dict[str, Any]
    seconds: float | None
    losses: tuple[LossRecord, ...] = ()

    @property
    def inputs(self) -> Mapping[str, Sequence[str]]:
        return dict(self.document["inputs"])


@dataclass(frozen=True, config=_CLOSED)
class RunOrigin:
    """The run that a record is of."""

    id: str
    name: str
    manifest_path: str
    started_at: str


@dataclass(frozen=True, config=_CLOSED)
class ArtifactEntry:
    """An artifact as a record lists it: its files by path as (digest, bytes)."""

    kind: str
    bytes: int
    files: dict[str, tuple[str, Annotated[int, Field(ge=0)]]]
    label: str
    external: bool

    def record(self, digest: str) -> ArtifactRecord:
        state = "external" if self.external else "present"
        members = {path: found for path, (found, _) in self.files.items()} if self.external else {}
        return ArtifactRecord(digest, self.kind, self.bytes, self.files, state, self.label, members)


@dataclass(frozen=True, config=_CLOSED)
class Record:
    """An artifact's making: the stages that lead to it, in the order they run."""

    target: str
    kind: str
    stage: str
    """The stage that made it."""
    run: RunOrigin
    manifest: dict[str, Any]
    """The resolved manifest, with these stages alone."""
    stages: tuple[StageRecord, ...]
    artifacts: dict[str, ArtifactEntry]
    tensors: dict[str, dict[str, dict[str, str]]]
    """Artifact → file → tensor → digest, of outputs that could be read."""
    format: Literal["kimi-eagle.record/1"] = "kimi-eagle.record/1"

    def document(self) -> dict[str, Any]:
        """As `kimi-eagle record` prints it."""
        return dict(_ADAPTER.dump_python(self, mode="json"))


_ADAPTER = TypeAdapter(Record)


def collect(registry: Registry, root: Path, prefix: str) -> Record:
    """The record of an artifact, by its hash or the start of it.

    Raises:
        UnknownDigest, AmbiguousDigest: as in `Search.find`.
        CannotReproduce: it is none that a stage made.
    """
    target, kind = Search(registry).find(prefix)
    if kind == RUN:
        raise CannotReproduce(_of_a_run(registry, target))
    artifact = registry.artifact(target)
    if artifact is None:
        raise CannotReproduce(f"{target} is a {kind}: give the hash of an artifact")
    executed = registry.producers(target)[-1:]
    producers = executed or registry.producers(target, reproduced=True)
    if not producers:
        if artifact.state == "external":
            raise CannotReproduce(
                f"{kind} {short(target)} ({artifact.label}) came from outside: no stage made it"
            )
        raise CannotReproduce(f"no run in this registry made {kind} {short(target)}")
    if artifact.kind == "snapshot":
        raise CannotReproduce(
            f"{short(target)} is a training on its way: reproduce the checkpoint that came of it"
        )
    # Of reproductions the first: later ones may have reused what it made, without a record of it.
    made = producers[0]
    run = registry.run(made.run_id)
    assert run is not None, "an execution belongs to a run"
    resolved = json.loads(registry.run_texts(made.run_id)["resolved"])
    resolved, names = lineage_of(resolved, made.stage)
    executions = {item.stage: item for item in registry.stages_of(made.run_id)}
    stages = []
    for name in names:
        execution = executions.get(name)
        if execution is None or execution.disposition not in _MADE or not execution.document:
            raise CannotReproduce(
                f"run {made.run_id} has no record of how it came by stage {name}: it cannot be "
                "made again from it"
            )
        stages.append(stage_record(root, _origin(registry, execution)))
    return Record(
        target,
        kind,
        made.stage,
        RunOrigin(run.id, run.name, run.manifest_path, run.started_at),
        resolved,
        tuple(stages),
        _artifacts(registry, stages),
        {},
    )


def stages_of(registry: Registry, root: Path, run_id: str) -> tuple[StageRecord, ...]:
    """The stages of a run that came to their end, each as it was made."""
    return tuple(
        stage_record(root, _origin(registry, execution))
        for execution in registry.stages_of(run_id)
        if execution.disposition in _MADE and execution.document
    )


def exported(root: Path, prefix: str) -> Record:
    """The record as it leaves the registry under `root`: with what tells tensors apart where the
    artifacts are not at hand.

    Raises: RegistryError, UnknownDigest, AmbiguousDigest, CannotReproduce.
    """
    registry = Registry(root, create=False)
    try:
        digests = Digests(registry)
        return with_tensors(collect(registry, root, prefix), Objects(root, digests))
    finally:
        registry.close()


def with_tensors(record: Record, objects: Objects) -> Record:
    """The record with the digests of the tensors of its stages' outputs, as far as they are there
    to be read."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for stage in record.stages:
        for digest in stage.outputs.values():
            artifact = record.artifacts[digest].record(digest)
            if objects.trouble(artifact) is not None:
                continue
            files = {
                path: tensor_digests(inside(objects.path(digest), path))
                for path in sorted(artifact.files)
                if path.endswith(".safetensors")
            }
            if files:
                found[digest] = files
    return Record(
        record.target,
        record.kind,
        record.stage,
        record.run,
        record.manifest,
        record.stages,
        record.artifacts,
        found,
    )


def read(path: Path, prefix: str) -> Record:
    """The record in a file, of the artifact that `prefix` starts.

    Raises:
        OSError: the file cannot be read.
        CannotReproduce: it is no record, was altered, or is of another artifact.
    """
    try:
        record = _ADAPTER.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise CannotReproduce(
            f"{path} is not a run record of this version ({where}: {first['msg']}); "
            "`kimi-eagle record HASH` writes one"
        ) from None
    wrong = _inconsistent(record)
    if wrong is not None:
        raise CannotReproduce(f"{path} does not hold together: {wrong}; it was altered")
    if not record.target.startswith(prefix.lower()):
        raise CannotReproduce(
            f"{path} is the record of {record.kind} {record.target}, not of {prefix}"
        )
    return record


def lineage_of(resolved: Mapping[str, Any], stage: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A resolved manifest with only a stage and those it takes from, and their names in order.

    Raises:
        CannotReproduce: this version of the program cannot read the manifest.
    """
    try:
        manifest = Manifest.model_validate_json(json.dumps(resolved))
    except ValidationError as error:
        first = error.errors()[0]
        raise CannotReproduce(
            "this version of kimi-eagle cannot read the recorded manifest "
            f"({'.'.join(map(str, first['loc']))}: {first['msg']}); use the version that made it"
        ) from None
    if stage not in manifest.stages:
        raise CannotReproduce(f"the recorded manifest has no stage {stage}")
    needed, waiting = set(), [stage]
    while waiting:
        name = waiting.pop()
        needed.add(name)
        waiting += [source for _, source in manifest.upstream(name) if source not in needed]
    names = tuple(name for name in manifest.order() if name in needed)
    return {**resolved, "stages": {name: resolved["stages"][name] for name in names}}, names


def losses(events: Path) -> tuple[LossRecord, ...]:
    """What a training logged, from the events kept with its run; empty where there are none."""
    found = []
    for event in EventReader(events).new():
        if event["event"] == "metric":
            at = event["step"] if "step" in event else event["epoch"] + 1
            found.append(LossRecord(event["split"], at, event["values"]))
    return tuple(found)


def _of_a_run(registry: Registry, run_id: str) -> str:
    made = ", ".join(
        f"{short(digest)} ({stage.stage})"
        for stage in registry.stages_of(run_id)
        for digest in stage.outputs.values()
    )
    return f"{run_id} is a run; give one of the artifacts it came by: {made or 'it has none'}"


def _origin(registry: Registry, execution: ExecutionRecord) -> ExecutionRecord:
    """The execution that a reused one took its outputs from."""
    if execution.reused_from is None:
        return execution
    return registry.execution(execution.reused_from)


def stage_record(root: Path, made: ExecutionRecord) -> StageRecord:
    """How an execution made its stage, with the losses that it logged."""
    return StageRecord(
        made.stage,
        made.kind,
        made.run_id,
        str(made.key),
        dict(made.document or {}),
        dict(made.outputs),
        dict(made.metrics),
        dict(made.environment),
        made.seconds,
        losses(root / made.run_id / "stages" / f"{made.stage}.events"),
    )


def _artifacts(registry: Registry, stages: Sequence[StageRecord]) -> dict[str, ArtifactEntry]:
    digests = [digest for stage in stages for digest in stage.outputs.values()]
    digests += [d for stage in stages for items in stage.inputs.values() for d in items]
    made = {digest for stage in stages for digest in stage.outputs.values()}
    found = {}
    for digest in dict.fromkeys(digests):
        artifact = registry.artifact(digest)
        if artifact is None:
            raise CannotReproduce(f"{digest} was taken in, and the registry no longer has it")
        found[digest] = ArtifactEntry(
            artifact.kind,
            artifact.bytes,
            dict(artifact.files),
            artifact.label,
            # A checkpoint that a training starts from was made by stages of another manifest.
            artifact.state == "external" or digest not in made,
        )
    return found


def _inconsistent(record: Record) -> str | None:
    """What of a record contradicts the rest; None when it holds together."""
    made: set[str] = set()
    for stage in record.stages:
        try:
            key = digest_document("stage/1", stage.document)
            inputs = [digest for items in stage.inputs.values() for digest in items]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return f"the key document of {stage.name} ({error})"
        if key != stage.key:
            return f"the key of {stage.name} is not that of its document"
        for digest in inputs:
            entry = record.artifacts.get(digest)
            if entry is None or not (entry.external or digest in made):
                return f"an input of {stage.name}, {short(digest)}, comes from nowhere"
        for digest in stage.outputs.values():
            if digest not in record.artifacts:
                return f"the output of {stage.name} is not described"
            made.add(digest)
    for digest, entry in record.artifacts.items():
        if entry.kind != "source" and digest_tree(entry.kind, entry.files) != digest:
            return f"the files of {entry.kind} {short(digest)} do not have its hash"
    if not record.stages or record.target not in record.stages[-1].outputs.values():
        return "no stage makes its target"
    return None
