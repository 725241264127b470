"""Compose the parts: what each command of the CLI does, free of parsing and of printing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.coordinator import LOST, RUNNING, as_it_is, ended_with
from kimi_eagle.manifest.load import LoadedManifest, load
from kimi_eagle.outcome import Reporter, RunOutcome
from kimi_eagle.pins import open_verifier
from kimi_eagle.planned import Guesses, planned
from kimi_eagle.planned import Planned as Planned
from kimi_eagle.records import ArtifactRecord, Edge, ExecutionRecord, Node, RunRecord
from kimi_eagle.registry import search as what
from kimi_eagle.registry.schema import RegistryError
from kimi_eagle.registry.search import Notes, RunFilter, Search
from kimi_eagle.rows_view import Bucket, RowView, buckets, rows
from kimi_eagle.runner import Runner

if TYPE_CHECKING:
    from kimi_eagle.exchange import Exchange, Exchanged
    from kimi_eagle.registry.store import Registry


@dataclass(frozen=True)
class Validation:
    loaded: LoadedManifest
    verifier_checked: bool


@dataclass(frozen=True)
class RunsFound:
    """Runs with their stages, newest first."""

    runs: Sequence[tuple[RunRecord, Sequence[ExecutionRecord]]]
    all: int
    """How many runs there are, whatever was asked for."""
    needed: Mapping[str, int]
    """Of each run's id, how many characters tell it from other hashes."""


@dataclass(frozen=True)
class Shown:
    """What a hash names: what is set is what belongs to it."""

    digest: str
    kind: str
    """`run`, an artifact's kind, or one of the constants in `registry.search`."""
    run: RunRecord | None = None
    stages: Sequence[ExecutionRecord] = ()
    texts: Mapping[str, str] | None = None
    artifact: ArtifactRecord | None = None
    notes: Notes | None = None
    producers: Sequence[ExecutionRecord] = ()
    consumers: Sequence[ExecutionRecord] = ()
    runs: Sequence[RunRecord] = ()
    holders: Sequence[tuple[str, str]] = ()
    state: Mapping[str, Any] | None = None
    buckets: Sequence[Bucket] = ()
    """Of rows: what became of the records that they were made from."""
    needed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Lineage:
    digest: str
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    needed: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As `lineage --json` prints it."""
        return {
            "nodes": [asdict(node) for node in self.nodes],
            "edges": [
                {"from": edge.source, "to": edge.target, "stage": edge.stage, "role": edge.role}
                for edge in self.edges
            ],
        }


def validate(path: Path, overrides: Sequence[str]) -> Validation:
    """Check a manifest; against the verifier too, where its folder is on this machine.

    Raises: ManifestError.
    """
    loaded = load(path, overrides)
    present = (loaded.folder / loaded.manifest.verifier.path).exists()
    if present:
        open_verifier(loaded)
    return Validation(loaded, present)


def plan(
    root: Path,
    path: Path,
    overrides: Sequence[str],
    reporter: Reporter,
    guesses: Guesses | None = None,
) -> Planned:
    """What is not on this machine of data, weights and tokenizer is listed, and hinders nothing.

    Args: `guesses`: figures that count for more than those of the manifest's `plan`.

    Raises: ManifestError, RegistryError; LookupError: a figure of no stage.
    """
    loaded = load(path, overrides)
    guessed = (guesses or Guesses()).over(loaded.manifest)
    open_verifier(loaded)
    runner = Runner(root, reporter)
    try:
        return planned(runner, loaded, guessed)
    finally:
        runner.close()


def submit(root: Path, path: Path, overrides: Sequence[str], reporter: Reporter) -> RunOutcome:
    """Raises: ManifestError, RegistryError: nothing was started."""
    from kimi_eagle.training_log import TrainingLog

    loaded = load(path, overrides)
    open_verifier(loaded)
    log = TrainingLog(reporter, loaded.manifest)
    runner = Runner(root, log)
    try:
        return runner.submit(loaded)
    finally:
        log.close()
        runner.close()


def placed(path: Path, overrides: Sequence[str], kind: str | None) -> list[str]:
    """The overrides with which a manifest runs on an executor of a kind; what it says of another
    kind goes, what it says of this one stays. Raises: ManifestError."""
    if kind is None or load(path).manifest.executor.kind == kind:
        return list(overrides)
    return [f"executor={{kind: {kind}}}", *overrides]


def resume(root: Path, run_id: str, reporter: Reporter) -> RunOutcome:
    """Take a run over whose coordinator died, and run it to its end.

    Raises: ManifestError, RegistryError; LookupError: it is not lost, or was not submitted.
    """
    from kimi_eagle.follow import outcome_of
    from kimi_eagle.training_log import TrainingLog

    with _asked(root) as registry:
        run = registry.run(run_id)
        texts = registry.run_texts(run_id)
        assert run is not None, "it was just found"
        ended = [
            stage
            for stage in registry.stages_of(run_id)
            if stage.disposition in ("executed", "reused")
        ]
        done = [
            (
                outcome_of(root, stage),
                stage if stage.reused_from is None else registry.execution(stage.reused_from),
            )
            for stage in ended
        ]
    if run.kind != "submit":
        raise LookupError(f"run {run_id} is no submitted one ({run.kind}): begin it again")
    loaded = load(Path(run.manifest_path), json.loads(texts["overrides"]), texts["manifest_text"])
    open_verifier(loaded)
    log = TrainingLog(reporter, loaded.manifest)
    runner = Runner(root, log)
    try:
        return runner.resume(run_id, loaded, done)
    finally:
        log.close()
        runner.close()


def push(
    root: Path, prefix: str, url: str, tell: Callable[[str], None], *, with_states: bool = False
) -> Exchanged:
    """Raises: RegistryError, UnknownDigest, AmbiguousDigest, LookupError, RemoteError."""
    with _asked(root) as registry:
        digest, _ = Search(registry).find(prefix, what="artifact")
    with _exchange(root, url, tell) as exchange:
        return exchange.push(digest, with_states=with_states)


def pull(
    root: Path, prefix: str, url: str, tell: Callable[[str], None], *, with_states: bool = False
) -> Exchanged:
    """Raises: RegistryError, LookupError, RemoteError."""
    with _exchange(root, url, tell) as exchange:
        return exchange.pull(exchange.find(prefix), with_states=with_states)


@contextmanager
def _exchange(root: Path, url: str, tell: Callable[[str], None]) -> Iterator[Exchange]:
    from kimi_eagle.exchange import Exchange
    from kimi_eagle.progress import PlainReporter
    from kimi_eagle.remote_store import RemoteStore

    remote = RemoteStore(url)
    runner = Runner(root, PlainReporter())
    try:
        yield Exchange(runner.root, runner.registry, runner.objects, runner.digests, remote, tell)
    finally:
        runner.close()


def runs(root: Path, wanted: RunFilter, limit: int | None) -> RunsFound:
    """Runs that a filter lets through, newest first; `wanted.artifact` may be shortened.

    Raises: RegistryError when there is no registry, UnknownDigest, AmbiguousDigest.
    """
    with _asked(root) as registry:
        search = Search(registry)
        status = wanted.status
        if wanted.artifact is not None:
            digest, kind = search.find(wanted.artifact, what="artifact")
            if registry.artifact(digest) is None:
                raise LookupError(f"{digest} is no artifact but a {kind}")
            wanted = replace(wanted, artifact=digest)
        if status in (RUNNING, LOST):
            # The registry cannot tell the two apart, and has few of both.
            found = [
                run
                for run in search.runs(replace(wanted, status=RUNNING))
                if as_it_is(root, run, registry.run).status == status
            ][:limit]
        else:
            found = search.runs(wanted, limit)
        seen = [as_it_is(root, run, registry.run) for run in found]
        return RunsFound(
            [(run, ended_with(run, registry.stages_of(run.id))) for run in seen],
            search.count_runs(),
            search.needed(run.id for run in seen),
        )


def show(root: Path, prefix: str) -> Shown:
    """Raises: RegistryError, UnknownDigest, AmbiguousDigest."""
    with _asked(root) as registry:
        search = Search(registry)
        digest, kind = search.find(prefix)
        found = _shown(root, registry, search, digest, kind)
        named = {digest, *(run.id for run in found.runs)}
        for stage in (*found.stages, *found.producers, *found.consumers):
            named |= {stage.run_id, *stage.outputs.values()} | ({stage.key} if stage.key else set())
        return replace(found, needed=search.needed(named))


def _shown(root: Path, registry: Registry, search: Search, digest: str, kind: str) -> Shown:
    if kind == what.RUN:
        run = registry.run(digest)
        assert run is not None, "it was just found"
        run = as_it_is(root, run, registry.run)
        return Shown(
            digest,
            kind,
            run=run,
            stages=ended_with(run, registry.stages_of(digest)),
            texts=registry.run_texts(digest),
        )
    if kind == what.KEY:
        made = [registry.execution(number) for number in search.executions_with_key(digest)]
        return Shown(digest, kind, stages=made)
    if kind == what.MANIFEST:
        return Shown(
            digest,
            kind,
            runs=[as_it_is(root, run, registry.run) for run in search.runs_of_manifest(digest)],
        )
    if kind == what.PART:
        return Shown(digest, kind, holders=search.holders(digest))
    if kind in (what.SHARD, what.ROW):
        return Shown(digest, kind, state=search.state(digest, kind))
    artifact = registry.artifact(digest)
    assert artifact is not None, "it was just found"
    return Shown(
        digest,
        kind,
        artifact=artifact,
        notes=search.notes(digest),
        buckets=buckets(registry, artifact, root / "objects" / digest[:2] / digest),
        producers=registry.producers(digest, reproduced=True),
        consumers=registry.consumers(digest),
    )


def needed(root: Path, hashes: set[str]) -> Mapping[str, int]:
    """Of each hash, how many characters tell it from all others; nothing without a registry."""
    try:
        with _asked(root) as registry:
            return Search(registry).needed(hashes)
    except RegistryError:
        return {}


def show_rows(
    root: Path, prefix: str, numbers: Sequence[int], sample: int, tokenizer: Path | None
) -> list[RowView]:
    """Raises: RegistryError, UnknownDigest, AmbiguousDigest, LookupError, OSError."""
    with _asked(root) as registry:
        return rows(root, registry, prefix, numbers, sample, tokenizer)


def lineage(root: Path, prefix: str, *, up: bool, down: bool) -> Lineage:
    """Raises: RegistryError, UnknownDigest, AmbiguousDigest."""
    with _asked(root) as registry:
        search = Search(registry)
        digest, kind = search.find(prefix, what="artifact")
        if registry.artifact(digest) is None:
            raise LookupError(
                f"{prefix} is a {kind}; `kimi-eagle show {prefix}` lists its artifacts, and each "
                "of them has a lineage"
            )
        nodes, edges = registry.lineage(digest, up=up, down=down)
        return Lineage(digest, nodes, edges, search.needed(node.digest for node in nodes))


def openlineage(root: Path, prefix: str, namespace: str) -> list[dict[str, Any]]:
    """A run's OpenLineage events, in order.

    Raises: RegistryError, UnknownDigest, AmbiguousDigest.
    """
    from kimi_eagle.openlineage import RunHistory, events

    with _asked(root) as registry:
        run = as_it_is(root, Search(registry).run(prefix), registry.run)
        stages = registry.stages_of(run.id)
        digests = {digest for stage in stages for digest in stage.outputs.values()}
        digests |= {
            digest
            for stage in stages
            for items in (stage.document or {}).get("inputs", {}).values()
            for digest in items
        }
        known = {digest: registry.artifact(digest) for digest in digests}
        reused = {
            stage.id: registry.execution(stage.reused_from).run_id
            for stage in stages
            if stage.reused_from is not None
        }
        history = RunHistory(
            run,
            json.loads(registry.run_texts(run.id)["environment"]),
            stages,
            {digest: record for digest, record in known.items() if record is not None},
            reused,
        )
        return events(history, namespace)


@contextmanager
def _asked(root: Path) -> Iterator[Registry]:
    """The registry under a root, which must be there. Raises: RegistryError."""
    registry = _registry(root)
    try:
        yield registry
    finally:
        registry.close()


def _registry(root: Path) -> Registry:
    # Imported late: SQLAlchemy takes longer to load than a run of unchanged stages does in all.
    from kimi_eagle.registry.store import Registry

    return Registry(root, create=False)
